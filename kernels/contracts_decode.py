"""Contracts of the kernels that run decode and verify steps: vLLM's and SGLang's.

The idea: they compute the same recurrence as the engines' recurrent kernels, so what those promise stands
once (`contracts_engines`), and a kernel here adds its interface: where gate and beta are made, how a
padded row is told, where the state after each token of a draft goes.

Leaves to others: contracts of prefill and of the plain recurrent kernels.
"""

from __future__ import annotations

from .cache import version_key
from .contract import Clause, Contract
from .contracts_engines import (
    RECURRENT_RELATIONS,
    SGLANG,
    VLLM,
    Source,
    _holds,
    profile_clauses,
    reach,
    relations,
    rule_domain,
)

VK_IN_PLACE = "[slots, HV, V, K], in place by index"
FRESH = "not taken: a new slot must hold zeros"
RAW_GATE = "made in the kernel from a, b, A_log, dt_bias in float32"
COLUMNS = (
    "slot_indices [N, columns]: the state after token t goes to column t; the call starts from column "
    "num_accepted - 1"
)
BY_INDEX = "a padded row is told by its index alone: a stale index of a live slot is written"
WRITES_BACK = "a row without a token writes back what it read: a race with the slot's owner"
BY_LENGTH = "a row without a token (cu_seqlens) touches nothing, whatever its index"


def _shared(clause: Source, at: str) -> tuple[Clause, ...]:
    """What all of them have in common."""
    return (
        clause("state.layout", "domain", "pool", VK_IN_PLACE, at),
        clause("has_initial_state", "domain", "pool", FRESH, at),
        clause("l2norm.place", "domain", "q, k", "in the kernel, eps 1e-6, float32, not rounded", at),
    )


def _contract(kernel: str, clause: Source, own: tuple[Clause, ...], at: str) -> Contract:
    clauses = (
        *rule_domain(clause), *reach(clause, "recurrent", at), *own, *relations(clause, RECURRENT_RELATIONS),
        *profile_clauses("fla-recurrent"),
    )  # fmt: skip
    return Contract(kernel=kernel, clauses=clauses)


def vllm_padding(clause: Source, at: str, version: str, *, by_length: bool) -> tuple[Clause, ...]:
    """How a padded row is told, in words and (`padding.safe`) for the relation padded-rows."""
    null_block = version_key(version) >= version_key("0.20.0")
    words = "index 0 or less is skipped" if null_block else "a negative index is skipped"
    safe = ["-1", *(["0"] if null_block else []), *(["empty"] if by_length else [])]
    return (
        clause("slots.padding", "domain", "slot_indices", words, at),
        clause("slots.stale", "domain", "slot_indices", BY_LENGTH if by_length else BY_INDEX, at),
        clause("padding.safe", "domain", "slot_indices, cu_seqlens", safe, at),
    )


def vllm_verify(version: str | None) -> Contract:
    """vllm.verify: `fused_recurrent_gated_delta_rule` with columns of slots (the layer's path in 0.19)."""
    version = version or VLLM
    clause, at = Source(f"vllm {version}"), "fused_recurrent.py"
    own = (
        *_shared(clause, at),
        *vllm_padding(clause, at, version, by_length=True),
        clause("slots.columns", "domain", "slot_indices, num_accepted", COLUMNS, at),
        clause("state.pool", "rounding", "state", "each column in the pool's dtype; carried in float32", at),
        clause("output.padded", "domain", "output", "rows of a skipped sequence are not written", at),
    )
    return _contract(f"vllm.verify@{version}", clause, own, at)


def vllm_decode(version: str | None) -> Contract:
    """vllm.decode: `fused_sigmoid_gating_delta_rule_update`, for decode and verify steps."""
    version = version or VLLM
    clause, at = Source(f"vllm {version}"), "fused_sigmoid_gating.py"
    own = (
        *_shared(clause, at),
        *vllm_padding(clause, at, version, by_length=True),
        clause("gate.input", "domain", "g, beta", RAW_GATE, at),
        clause("slots.columns", "domain", "slot_indices, num_accepted", COLUMNS, at),
        clause("state.pool", "rounding", "state", "each column in the pool's dtype; carried in float32", at),
        clause("output.padded", "domain", "output", "rows of a skipped sequence are not written", at),
    )
    return _contract(f"vllm.decode@{version}", clause, own, at)


def vllm_packed_decode(version: str | None) -> Contract:
    """vllm.packed-decode: `fused_recurrent_gated_delta_rule_packed_decode`, one token per row."""
    version = version or VLLM
    clause, at = Source(f"vllm {version}"), "fused_recurrent.py packed_decode"
    own = (
        *_shared(clause, at),
        *vllm_padding(clause, at, version, by_length=False),
        clause("gate.input", "domain", "g, beta", RAW_GATE, at),
        *_holds(
            (clause("beta.dtype", "transform", "beta", "bfloat16", f"{at}: as b", until="0.20.0"),), version
        ),
        clause("tokens", "domain", "cu_seqlens", "one token per row and call", at),
        clause("state.pool", "rounding", "state", "stored in the pool's dtype after every token", at),
        clause("output.padded", "domain", "output", "rows of a skipped sequence are zero", at),
    )
    return _contract(f"vllm.packed-decode@{version}", clause, own, at)


def negative_is_safe(clause: Source, at: str) -> Clause:
    """For the relation padded-rows: rows with a negative index touch nothing."""
    return clause("padding.safe", "domain", "slot_indices, cu_seqlens", ["-1"], at)


def _sglang_padding(clause: Source, at: str) -> Clause:
    value = "a negative index starts at zero, is not stored"
    return clause("slots.padding", "domain", "slot_indices", value, at)


def sglang_decode(version: str | None) -> Contract:
    """sglang.decode: `fused_sigmoid_gating_delta_rule_update` on the pool in place."""
    version = version or SGLANG
    clause, at = Source(f"sglang {version}"), "linear/fused_sigmoid_gating_recurrent.py"
    own = (
        *_shared(clause, at),
        _sglang_padding(clause, at),
        clause("gate.input", "domain", "g, beta", RAW_GATE, at),
        clause("slots.stale", "domain", "slot_indices", WRITES_BACK, at),
        negative_is_safe(clause, at),
        clause("state.pool", "rounding", "state", "stored in the pool's dtype at the end of the call", at),
    )
    return _contract(f"sglang.decode@{version}", clause, own, at)


def sglang_packed_decode(version: str | None) -> Contract:
    """sglang.packed-decode: `fused_recurrent_gated_delta_rule_packed_decode`, one token per row."""
    version = version or SGLANG
    clause, at = Source(f"sglang {version}"), "fla/fused_recurrent.py packed_decode"
    own = (
        *_shared(clause, at),
        clause("slots.padding", "domain", "slot_indices", "a negative index is skipped", at),
        clause("gate.input", "domain", "g, beta", RAW_GATE, at),
        clause("beta.dtype", "transform", "beta", "bfloat16", f"{at}: as b"),
        clause("tokens", "domain", "cu_seqlens", "one token per row and call", at),
        clause("slots.stale", "domain", "slot_indices", BY_INDEX, at),
        negative_is_safe(clause, at),
        clause("state.pool", "rounding", "state", "stored in the pool's dtype after every token", at),
        clause("output.padded", "domain", "output", "rows of a skipped sequence are zero", at),
    )
    return _contract(f"sglang.packed-decode@{version}", clause, own, at)


def sglang_verify(version: str | None) -> Contract:
    """sglang.verify: the target verify, whose states per token go to a buffer beside the pool."""
    version = version or SGLANG
    clause, at = Source(f"sglang {version}"), "linear/fused_sigmoid_gating_recurrent.py"
    buffer = (
        "the state after token t goes to row t of an intermediate buffer; the pool is read only, and the "
        "engine copies the accepted row into it (here: every row, to its column)"
    )
    own = (
        *_shared(clause, at),
        _sglang_padding(clause, at),
        clause("gate.input", "domain", "g, beta", RAW_GATE, at),
        clause("slots.columns", "domain", "slot_indices, num_accepted", buffer, at),
        clause("state.pool", "rounding", "state", "each row in the buffer's dtype; carried in float32", at),
    )
    return _contract(f"sglang.verify@{version}", clause, own, at)
