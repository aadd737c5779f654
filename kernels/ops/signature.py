"""What each operation of the layer's core takes and gives, by canonical name: the one table that adapters,
case files and verdicts share.

The core, in order: `conv` (causal depthwise, with SiLU) -> `split` (channels q|k|v into heads) -> `l2norm` ->
`gate` -> the rule (`chunk`, `recurrent`) -> `norm` (gated RMSNorm). A fused operation is an entry of its own:
`post-conv` is split, l2norm and gate in one kernel. Shapes are those of the design, section 4; T tokens, HK
key heads of K, HV value heads of V, D = 2 HK K + HV V channels in the order q|k|v, W taps, N sequences.
"""

from __future__ import annotations

import msgspec


class OpSignature(msgspec.Struct, frozen=True, kw_only=True):
    """One operation."""

    op: str
    inputs: tuple[str, ...]
    """Tensors that every call has."""
    optional: tuple[str, ...] = ()
    """Tensors that a call may have; the operation says what their absence means."""
    outputs: tuple[str, ...]
    """Tensors that every adapter returns."""
    shows: tuple[str, ...] = ()
    """Tensors that an adapter may return besides."""


STATE = ("initial_state", "has_initial_state", "pool", "slot_indices")
CONV_STATE = ("conv_state", "conv_pool", "slot_indices", "read_slot_indices", "has_initial_state")

SIGNATURES: dict[str, OpSignature] = {
    s.op: s
    for s in (
        # conv_input [T, D], conv_weight [D, W], conv_bias [D], cu_seqlens [N+1]; the past of each sequence
        # is conv_state [N, D, W-1] (oldest first) or its row of conv_pool [slots, D, W-1]; absent is zeros.
        # conv_output [T, D] is after SiLU; final_conv_state [N, D, W-1]; conv_pool as the call left it. With
        # read_slot_indices [N] a sequence starts from another row than the one it leaves its state in.
        OpSignature(
            op="conv",
            inputs=("conv_input", "conv_weight", "cu_seqlens"),
            optional=("conv_bias", *CONV_STATE),
            outputs=("conv_output", "final_conv_state"),
            shows=("conv_pool",),
        ),
        # The same for decode: one token, or a few, of each sequence, state updated in place. With
        # num_accepted [N], of the draft before, rows are longer, [slots, D, W-1+drafts]: the window starts
        # num_accepted - 1 columns in, and the row that is left is the window without its oldest input, then
        # the call's own tokens.
        OpSignature(
            op="conv-update",
            inputs=("conv_input", "conv_weight", "cu_seqlens"),
            optional=("conv_bias", *CONV_STATE, "num_accepted"),
            outputs=("conv_output", "final_conv_state"),
            shows=("conv_pool",),
        ),
        # conv_output [T, D] -> q, k [T, HK, K], v [T, HV, V]; RunOptions.heads says (HK, K, HV, V).
        OpSignature(op="split", inputs=("conv_output",), outputs=("q", "k", "v")),
        # Raw q, k [T, HK, K] -> q, k of unit length.
        OpSignature(op="l2norm", inputs=("q", "k"), outputs=("q", "k")),
        # a, b [T, HV], A_log, dt_bias [HV] -> g [T, HV] (natural log, float32), beta [T, HV].
        OpSignature(op="gate", inputs=("a", "b", "A_log", "dt_bias"), outputs=("g", "beta")),
        OpSignature(
            op="post-conv",
            inputs=("conv_output", "a", "b", "A_log", "dt_bias"),
            outputs=("q", "k", "v", "g", "beta"),
        ),
        # core_output [T, HV, V] (what the rule gave), z [T, HV, V], norm_weight [V] -> normed [T, HV, V].
        OpSignature(op="norm", inputs=("core_output", "z", "norm_weight"), outputs=("normed",)),
        OpSignature(
            op="rule",
            inputs=("q", "k", "v", "g", "beta", "cu_seqlens"),
            optional=STATE,
            outputs=("output", "final_state"),
            shows=("pool",),
        ),
        # The whole core as one call; `normed` [T, HV, V] is the layer core output. RunOptions.heads as split.
        OpSignature(
            op="core",
            inputs=(
                "conv_input", "conv_weight", "a", "b", "A_log", "dt_bias", "z", "norm_weight", "cu_seqlens",
            ),
            optional=("conv_bias", *CONV_STATE, "initial_state", "pool"),
            outputs=("normed", "final_state", "final_conv_state"),
            shows=("conv_output", "q", "k", "v", "g", "beta", "output"),
        ),
    )
}  # fmt: skip
RULE_OPS = ("chunk", "recurrent", "decode", "packed-decode", "verify")
"""Operations whose kernels are judged as the rule."""


def signature_of(op: str) -> OpSignature:
    """The signature that a kernel's op follows: the three ways to run the rule share one."""
    return SIGNATURES["rule" if op in RULE_OPS else op]
