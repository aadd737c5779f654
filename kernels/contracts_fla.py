"""Contracts of flash-linear-attention, transformers' torch kernel, our emulation, and an unknown kernel.

The idea: what a kernel promises was read in its source once, and stands here as a table with the place
where it was read. Cast points come from the same precision table that the emulation executes, so that a
contract and the yardstick of tier 3 cannot disagree.

Relations: `promised` means bit for bit by the construction of the kernel (a breach is a fault), `observed`
means that it was seen and follows from the present code but nothing says that it stays, `not promised`
that bits legitimately change. No clause excuses a non-finite value where the truth is finite.

Leaves to others: the serving engines' contracts (`contracts_engines`, which also makes the clauses), what
a clause does to a verdict (`compare.clauses`).
"""

from __future__ import annotations

from ..capture.errors import BadInput
from .cache import version_key
from .contract import Clause, Contract
from .contracts_engines import Source, casts_of

# Versions whose sources were read from end to end; in those between, what changed when is below.
FLA_READ = ("0.4.0", "0.6.0")
# kkt and solve in one kernel that merges in tf32, value heads that share key heads: chunk_fwd.py is there.
FLA_FUSED = "0.5.0"
# prepare_chunk_indices counts empty sequences (found by bisection).
FLA_COUNTS_EMPTY = "0.5.1"
# The public function obeys chunk_size, and no kernel uses block pointers.
FLA_CHUNK_SIZES = "0.5.2"
# A kernel that splits long sequences may take the state's place (0.4.2's has a switch of its own only).
FLA_INTRACARD = "0.4.2"
TRANSFORMERS_READ = "5.24.0"

_CHUNK = "ops/gated_delta_rule/chunk.py"
_STATE = "ops/common/chunk_delta_h.py"
_OUTPUT = "ops/common/chunk_o.py"
_KKT = "ops/common/chunk_scaled_dot_kkt.py"
_FUSED = "ops/gated_delta_rule/chunk_fwd.py"
_RECURRENT = "ops/gated_delta_rule/fused_recurrent.py"
_INDEX = "ops/utils/index.py"

# Relation -> (promise, why). The first block holds for every kernel whose programs own one sequence and head.
_ALWAYS = {
    "run-to-run": ("promised", "no atomics: each output is written by one program in a fixed order"),
    "causality": ("promised", "later tokens reach earlier rows only through entries that are masked to zero"),
    "isolation": ("promised", "a program reads the tokens of one sequence only"),
    "slot-permutation": ("not promised", "takes no slots: states come gathered, one per sequence"),
    "across-processes": ("not promised", "each process tunes for itself, and a block size orders the sums"),
    "power-of-two-scaling": (
        "observed",
        "linear in v and the state; bits kept while nothing over- or underflows",
    ),
    "call-order": ("observed", "chunk indices are cached by the identity of cu_seqlens: hand a fresh tensor"),
    "first-vs-warm": (
        "observed",
        "tuning launches the kernel before the first call counts; stores are idempotent",
    ),
}
_CHUNK_ONLY = {
    "split-concat": ("observed", "float32 state at multiples of the chunk size is what the loop carries on"),
    "prefix-state": ("observed", "at multiples of the chunk size, for the reason of split-concat"),
    "head-permutation": ("observed", "heads are one axis of the grid"),
    "sequence-permutation": ("observed", "sequences are one axis of the grid; chunks start anew in each"),
    "batch-invariance": ("observed", "tuning keys hold head counts and dims, neither tokens nor sequences"),
    "beta-zero": (
        "observed",
        "w = u = 0, so the state decays by exp of each chunk's sum: equal within rounding",
    ),
    "unowned": ("not promised", "o is torch.empty: rows that no sequence owns hold what the memory held"),
}
_RECURRENT_ONLY = {
    "split-concat": ("promised", "the float32 state is all that a token hands to the next"),
    "prefix-state": ("promised", "the state after a token does not depend on later ones"),
    "head-permutation": ("promised", "heads are one axis of the grid, nothing is tuned"),
    "sequence-permutation": ("promised", "sequences are one axis of the grid, nothing is tuned"),
    "batch-invariance": ("promised", "one program per sequence, head and value block, nothing is tuned"),
    "beta-zero": ("promised", "the error is multiplied by beta: only the decay is left"),
    "unowned": ("not promised", "o is torch.empty: rows that no sequence owns hold what the memory held"),
}
_TORCH_ONLY = {
    **_CHUNK_ONLY,
    "isolation": ("observed", "packed input is run sequence by sequence by the adapter"),
    "across-processes": ("observed", "library calls on one machine; the number of threads may order sums"),
    "batch-invariance": ("observed", "a batched product may take another path for another batch size"),
    "call-order": ("promised", "keeps nothing between calls"),
    "first-vs-warm": ("promised", "nothing is compiled or tuned"),
    "unowned": ("observed", "every row is written; padding is cut off"),
}


def relation_clauses(source: Source, *tables: dict[str, tuple[str, str]]) -> tuple[Clause, ...]:
    """Relation clauses; a later table overrides an earlier one. The reason stands in each clause's source."""
    merged = {name: entry for table in tables for name, entry in table.items()}
    return tuple(
        source(f"relation.{name}", "relation", name, promise, why) for name, (promise, why) in merged.items()
    )


def _rule_domain(clause: Source, where: str) -> tuple[Clause, ...]:
    """Domain that all of them share."""
    return (
        clause("gate.sign", "domain", "g", "g <= 0", where),
        clause("gate.space", "domain", "g", "log", where),
        clause("beta.range", "domain", "beta", [0, 1], where),
        clause("key.norm", "domain", "k", "beta |k|^2 <= 1 for a bounded state: normalise k", where),
        clause("l2norm.eps", "domain", "q, k", 1e-6, "inside the root, as in the rule: no transform"),
    )


def fla_chunk(version: str | None, chunk_size: int = 64) -> Contract:
    """fla.chunk at a version; 0.6.0 takes another path, and so other casts, below chunk size 64."""
    version = version or FLA_READ[-1]
    at = version_key(version)

    def has(since: str) -> bool:
        return at >= version_key(since)

    second = has(FLA_FUSED)
    clause = Source(f"fla-core {FLA_READ[1] if second else FLA_READ[0]}")
    profile = ("fla-0.6" if chunk_size == 64 else "fla-0.6-small") if second else "fla-0.4"
    own = [
        clause("gate.inf", "domain", "g", "finite: -inf gives NaN, as G_i - G_j is -inf minus -inf", _KKT),
        clause(
            "gate.overflow", "domain", "g", "any finite sum: exp(G_i - G_j) is masked, never factored", _KKT
        ),
        clause(
            "nonfinite.spread",
            "domain",
            "q, k, v, state",
            "reaches its whole chunk and all that follow",
            _OUTPUT,
        ),
        clause("dims", "domain", "K", "K <= 256", _STATE),
        clause("state.layout", "domain", "initial_state", "[N, HV, K, V]", _STATE),
        clause(
            "batch",
            "domain",
            "cu_seqlens",
            "batch 1 beside cu_seqlens; one initial state per sequence",
            _CHUNK,
        ),
        clause("cu_seqlens.identity", "domain", "cu_seqlens", "a tensor of its own for every call", _INDEX),
        clause("inputs.dtype", "domain", "q, k, v", "one dtype; beta and g may differ from it", _CHUNK),
    ]
    heads = "HV is a multiple of HK" if second else "HV = HK: heads come expanded"
    width = "int64" if has(FLA_READ[1]) else "int32 products in places"
    own += [
        clause("heads.ratio", "domain", "heads", heads, _CHUNK),
        clause("index.width", "domain", "tokens", width, _CHUNK if has(FLA_READ[1]) else _STATE),
    ]
    if has(FLA_CHUNK_SIZES):
        own.append(clause("chunk_size", "domain", "chunk_size", [16, 32, 64], _FUSED))
    else:
        stages = "" if second else "; the stage functions take 16, 32 and 64"
        own += [
            clause("chunk_size", "domain", "chunk_size", [64],
                   f"{_CHUNK}: other values are swallowed{stages}"),
            clause("triton", "domain", "environment", "triton < 3.9: uses block pointers", _STATE),
        ]  # fmt: skip
    if has(FLA_INTRACARD):
        own.append(
            clause("context-parallel", "domain", "state", "off: FLA_INTRACARD_CP=1 splits a long sequence",
                   "ops/common/backends/intracard.py; FLA_DISABLE_BACKEND_DISPATCH=1 keeps it off from 0.5.0")
        )  # fmt: skip
    if not has(FLA_COUNTS_EMPTY):
        own.append(
            clause("lengths.empty", "domain", "cu_seqlens",
                   "empty sequences only at the end: chunks number the sequences without them", _INDEX)
        )  # fmt: skip
    relations = relation_clauses(clause, _ALWAYS, _CHUNK_ONLY)
    clauses = (*_rule_domain(clause, _CHUNK), *own, *relations, *casts_of(profile), profile_clause(profile))
    return Contract(kernel=f"fla.chunk@{version}", clauses=clauses)


def fla_recurrent(version: str | None, chunk_size: int = 64) -> Contract:
    """fla.recurrent at a version; chunk_size means nothing to it."""
    version = version or FLA_READ[-1]
    second = version_key(version) >= version_key(FLA_READ[1])
    clause = Source(f"fla-core {FLA_READ[1] if second else FLA_READ[0]}")
    order = "(q, k, v, g, gk, gv, beta, ...): beta is seventh, call with keywords"
    own = (
        clause("arguments", "domain", "call", order, _RECURRENT),
        clause("gate.inf", "domain", "g", "-inf is a reset: exp gives zero", _RECURRENT),
        clause(
            "nonfinite.spread", "domain", "q, k, v, state", "reaches later tokens of its sequence", _RECURRENT
        ),
        clause("heads.ratio", "domain", "heads", "HV is a multiple of HK", _RECURRENT),
        clause("state.layout", "domain", "initial_state", "[N, HV, K, V]", _RECURRENT),
        clause("padding.safe", "domain", "cu_seqlens", ["empty"], _RECURRENT),
        clause("index.width", "domain", "tokens", "int64", _RECURRENT),
    )
    relations = relation_clauses(clause, _ALWAYS, _RECURRENT_ONLY, {
        "across-processes": ("promised", "nothing is tuned: one warp count, block sizes from K and V"),
        "first-vs-warm": ("promised", "nothing is tuned"),
        "call-order": ("promised", "keeps nothing between calls"),
    })  # fmt: skip
    casts = casts_of("fla-recurrent")
    clauses = (*_rule_domain(clause, _RECURRENT), *own, *relations, *casts, profile_clause("fla-recurrent"))
    return Contract(kernel=f"fla.recurrent@{version}", clauses=clauses)


def transformers_chunk(version: str | None, chunk_size: int = 64) -> Contract:
    """transformers.chunk: the torch fallback, float32 throughout."""
    where = "models/qwen3_5/modeling_qwen3_5.py: torch_chunk_gated_delta_rule"
    clause = Source(f"transformers {TRANSFORMERS_READ}")
    own = (
        clause("scale", "domain", "scale", "K**-0.5: takes no other", where),
        clause("packing", "domain", "cu_seqlens", "one sequence length per call: takes no cu_seqlens", where),
        clause("gate.inf", "domain", "g", "finite: -inf gives NaN, as G_i - G_j is -inf minus -inf", where),
        clause(
            "gate.overflow", "domain", "g", "any finite sum: upper entries are set to -inf before exp", where
        ),
        clause(
            "nonfinite.spread",
            "domain",
            "q, k, v, state",
            "reaches its whole chunk and all that follow",
            where,
        ),
        clause("heads.ratio", "domain", "heads", "HV is a multiple of HK (5.7: heads come expanded)", where),
        clause("state.layout", "domain", "initial_state", "[N, HV, K, V]", where),
    )
    relations = relation_clauses(clause, _ALWAYS, _TORCH_ONLY)
    clauses = (
        *_rule_domain(clause, where), *own, *relations, *casts_of("hf-torch"), profile_clause("hf-torch"),
    )  # fmt: skip
    return Contract(kernel=f"transformers.chunk@{version or TRANSFORMERS_READ}", clauses=clauses)


def transformers_recurrent(version: str | None, chunk_size: int = 64) -> Contract:
    """transformers.recurrent: the torch loop over tokens, float32 throughout; no chunks."""
    where = "models/qwen3_5/modeling_qwen3_5.py: torch_recurrent_gated_delta_rule"
    clause = Source(f"transformers {TRANSFORMERS_READ}")
    own = (
        clause("scale", "domain", "scale", "K**-0.5: takes no other", where),
        clause("packing", "domain", "cu_seqlens", "one sequence length per call: takes no cu_seqlens", where),
        clause("gate.inf", "domain", "g", "-inf is a reset: exp gives zero", where),
        clause("nonfinite.spread", "domain", "q, k, v, state", "reaches later tokens of its sequence", where),
        clause("heads.ratio", "domain", "heads", "HV is a multiple of HK (5.7: heads come expanded)", where),
        clause("state.layout", "domain", "initial_state", "[N, HV, K, V]", where),
    )
    # Sums over K are library reductions, whose order may depend on the shapes beside them.
    relations = relation_clauses(clause, _ALWAYS, _TORCH_ONLY, {
        "unowned": ("promised", "every row is written"),
        "beta-zero": ("promised", "the error is multiplied by beta: only the decay is left"),
        "split-concat": ("observed", "the float32 state is all that a token hands to the next"),
        "prefix-state": ("observed", "the state after a token does not depend on later ones"),
    })  # fmt: skip
    casts = casts_of("fla-recurrent")
    clauses = (*_rule_domain(clause, where), *own, *relations, *casts, profile_clause("fla-recurrent"))
    return Contract(kernel=f"transformers.recurrent@{version or TRANSFORMERS_READ}", clauses=clauses)


def emulation_contract(op: str, profile: str) -> Contract:
    """Our own emulation under a profile: `emulation.chunk` or `emulation.recurrent`."""
    where = "reference/emulation.py" if op == "chunk" else "reference/emulation_recurrent.py"
    clause = Source("gdncheck")
    per_op = _RECURRENT_ONLY if op == "recurrent" else _CHUNK_ONLY
    spread = "its whole chunk and all that follow" if op == "chunk" else "later tokens of its sequence"
    gate = "finite: -inf gives NaN" if op == "chunk" else "-inf is a reset"
    own = (
        clause("gate.inf", "domain", "g", gate, where),
        clause("nonfinite.spread", "domain", "q, k, v, state", f"reaches {spread}", where),
        clause("heads.ratio", "domain", "heads", "HV is a multiple of HK", where),
        clause("state.layout", "domain", "initial_state", "[N, HV, K, V]", where),
    )
    library = ("observed", "library products: bits may depend on the batch of matrices and on threads")
    relations = relation_clauses(clause, _ALWAYS, per_op, {
        "across-processes": ("observed", "one machine, one number of threads"),
        "first-vs-warm": ("promised", "nothing is compiled or tuned"),
        "call-order": ("promised", "keeps nothing between calls"),
        "unowned": ("promised", "rows that no sequence owns are zero"),
        **dict.fromkeys(("split-concat", "prefix-state", "batch-invariance"), library),
        **dict.fromkeys(("head-permutation", "sequence-permutation"), library),
    })  # fmt: skip
    clauses = (*_rule_domain(clause, where), *own, *relations, *casts_of(profile), profile_clause(profile))
    return Contract(kernel=f"emulation.{op}", clauses=clauses)


def generic(name: str) -> Contract:
    """What is asked of a kernel that declares nothing: the rule's domain, the coarsest sound rounding."""
    clause = Source("gdncheck's default for a kernel that declares nothing")
    relations = relation_clauses(clause, {
        "run-to-run": ("promised", "unless a clause says otherwise"),
        "causality": ("promised", "the rule itself"),
        "isolation": ("promised", "the rule itself"),
        "across-processes": ("not promised", "it may be tuned"),
        "unowned": ("not promised", "nothing is known of its allocations"),
    })  # fmt: skip
    clauses = (*_rule_domain(clause, ""), *relations, *casts_of("generic"), profile_clause("generic"))
    return Contract(kernel=name, clauses=clauses)


def profile_clause(profile: str) -> Clause:
    """Names the precision profile whose casts a contract quotes."""
    return Source("reference/precision.py")("precision.profile", "rounding", "emulation", profile)


_TABLE = {
    "fla.chunk": fla_chunk,
    "fla.recurrent": fla_recurrent,
    "transformers.chunk": transformers_chunk,
    "transformers.recurrent": transformers_recurrent,
}


def contract_for(name: str, version: str | None, chunk_size: int = 64) -> Contract:
    """The contract of a kernel by `family.op`, or of any other name the generic one.

    version None: the newest that was read. Raises BadInput for an operation that a known family lacks.
    """
    if name in _TABLE:
        return _TABLE[name](version, chunk_size)
    family, _, op = name.partition(".")
    if family == "emulation" and op in ("chunk", "recurrent"):
        return emulation_contract(op, "generic" if op == "chunk" else "fla-recurrent")
    if family in ("fla", "transformers", "emulation"):
        known = ", ".join([*_TABLE, "emulation.chunk", "emulation.recurrent"])
        raise BadInput(f"no contract for {name}; known here: {known}")
    return generic(name if version is None else f"{name}@{version}")
