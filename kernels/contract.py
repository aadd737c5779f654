"""What a kernel declares about itself, as data: capabilities and contract clauses.

The idea: a departure from the truth is a fault only if no promise covers it, so promises are typed
data that the verdict, the sweep and the documentation walk, never prose inside an adapter.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

ClauseKind = Literal["domain", "transform", "rounding", "relation"]
Promise = Literal["promised", "observed", "not promised"]


# Relations of tier 4 by the one name that contracts, checks and reports use, each with its statement.
RELATIONS: dict[str, str] = {
    "run-to-run": "the same call gives the same bits",
    "causality": "later tokens never reach earlier outputs",
    "causality-cuts": "causality, at many cuts in one call",
    "silent-queries": "causality and isolation, where a zero query makes the answer exact",
    "isolation": "sequences of one call do not touch each other",
    "split-concat": "a prefill cut at multiples of the chunk size, the state handed on, equals the uncut one",
    "prefix-state": "the state that later tokens read is the final state of the tokens before them",
    "head-permutation": "permuted heads give permuted results",
    "rank-slice": "the heads of one rank of a tensor-parallel group, alone, give their slice of the result",
    "sequence-permutation": "permuted sequences give permuted results",
    "slot-permutation": "which slot of the pool holds a sequence's state changes nothing",
    "power-of-two-scaling": "v and the initial state times 2^k give output and state times 2^k",
    "beta-zero": "with beta = 0 the state only decays",
    "batch-invariance": "a sequence gives the same alone and in company",
    "call-order": "what was called before changes nothing",
    "first-vs-warm": "a process's first call gives what later ones give",
    "across-processes": "another process gives the same",
    "fresh-memory": "memory that nobody has written yet may hold anything, and nothing is written outside",
    "unowned": "rows beyond the last sequence, and slots of nobody, may hold anything and are left alone",
    "checkpoints": "a state stored at token p is the final state of the first p tokens",
    "padded-rows": "rows of a replayed batch that are nobody's, by index or without a token, touch nothing",
    "exact": "where nothing needs rounding every bit agrees with the truth",
}
# A finer test of a relation is promised as far as the relation itself.
PART_OF = {"causality-cuts": "causality", "silent-queries": "causality"}
# What holds unless a contract says otherwise; the rest is `observed`.
PROMISED_BY_DEFAULT = ("run-to-run", "fresh-memory")


class Clause(msgspec.Struct, frozen=True, kw_only=True):
    """One promise (or one disclaimed promise) of a kernel."""

    id: str
    """Dotted name, e.g. `l2norm.eps`, `cast.w`, `relation.causality`."""
    kind: ClauseKind
    applies_to: str
    """Tensor, stage or relation that the clause speaks of."""
    value: Any
    source: str
    """Package, version and place where the clause was read or measured."""
    since: str | None = None
    until: str | None = None
    """Version range [since, until) in which it holds; None is open."""


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """All clauses of one kernel at one version."""

    kernel: str
    clauses: tuple[Clause, ...] = ()

    def find(self, clause_id: str) -> Clause | None:
        return next((c for c in self.clauses if c.id == clause_id), None)

    def value(self, clause_id: str, default: Any = None) -> Any:
        clause = self.find(clause_id)
        return default if clause is None else clause.value

    def relation(self, name: str) -> Promise:
        """How far a relation of RELATIONS is promised: by its clause, else by PROMISED_BY_DEFAULT."""
        name = PART_OF.get(name, name)
        default = "promised" if name in PROMISED_BY_DEFAULT else "observed"
        promise: Promise = self.value(f"relation.{name}", default)
        return promise

    def rounding(self) -> dict[str, str]:
        """Cast point -> format, for the emulation (`native` follows the input dtype)."""
        return {c.id.removeprefix("cast."): c.value for c in self.clauses if c.id.startswith("cast.")}


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a kernel can be asked to do; the sweep skips axes that it cannot take."""

    chunk_sizes: tuple[int, ...] = ()
    """Values that `chunk_size` may take; empty: fixed by the kernel."""
    default_chunk_size: int | None = 64
    """Chunk the kernel works in when nothing is asked; None: no chunks (a recurrent kernel)."""
    gva: bool = True
    """Takes HV > HK without expanded heads."""
    varlen: bool = True
    """Takes several sequences through cu_seqlens in one call."""
    state_layout: Literal["KV", "VK"] = "KV"
    gate_space: Literal["log", "linear"] = "log"
    l2norm: Literal["in_kernel", "before", "both"] = "before"
    """Can the kernel l2-normalise q and k itself."""
    state_dtypes: tuple[str, ...] = ("float32",)
    input_dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    slots: bool = False
    """Addresses a pool in place by slot_indices."""
    columns: bool = False
    """Takes a verify step: slot_indices [N, columns] and num_accepted [N]."""
    checkpoints: Literal["chunks", "every"] | None = None
    """Exports states from inside a prefill, `checkpoints` [M, HV, K, V]: `chunks`, at its chunks' starts
    (extra `checkpoints`), or `every`, one after each page of tokens (extra `checkpoint_every`)."""
    replays: bool = False
    """Can be replayed from a CUDA graph with padded rows: extra `replay`."""
    channel_gate: bool = False
    """Takes g [T, HV, K]."""
    pins: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    profile: str | None = None
    """Name of a precision profile of the emulation (`reference.rounding.PROFILES`); None: by dtype."""
    clauses: tuple[Clause, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    max_tokens_cpu: int | None = None
    """Above this many tokens a CPU run (Triton's interpreter) is too slow to start unasked."""
