"""Make a synthetic case: check the arguments, let the family draw in float64, round, pack.

The idea: the same (family, arguments, seed) gives the same content hash on every machine, so a case can be
named in a bug report instead of being sent. What a family draws is `capture.synthetic`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from .case import CallOptions, Case, Origin
from .casefile import hash_of
from .errors import BadInput
from .synthetic import decay, exact, realistic, solve
from .synthetic.family import Family, Inputs, Shape
from .synthetic.portable import Draw
from .synthetic.verify_step import verify_step

FAMILIES: dict[str, Family] = {
    **realistic.FAMILIES,
    **exact.FAMILIES,
    **solve.FAMILIES,
    **decay.FAMILIES,
}

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp16": torch.float16, "float16": torch.float16,
    "fp32": torch.float32, "float32": torch.float32,
}  # fmt: skip
LARGEST_INTEGER = {torch.bfloat16: 256, torch.float16: 2048, torch.float32: 1 << 24}
STATES = ("none", "zeros", "random", "stale")
MAX_ELEMENTS = 1 << 31  # of one drawn tensor: 16 GiB in float64
GENERATOR_VERSION = 1  # raise it whenever a family would draw something else from the same seed


def make(
    family: str,
    *,
    lengths: Sequence[int],
    k_heads: int = 2,
    v_heads: int = 4,
    dims: tuple[int, int] = (64, 64),
    dtype: str = "bf16",
    state: str | Sequence[str] = "none",
    seed: int = 0,
    beta_dtype: str | None = None,
    state_dtype: str = "fp32",
    qk: Literal["raw", "normalised"] | None = None,
    draft: int | None = None,
) -> Case:
    """A synthetic case of a family.

    lengths: tokens per sequence, 0 allowed. dims: (K, V). dtype: of q, k, v; beta_dtype: of beta, None for
    the same. state: `none` (no initial_state), `zeros`, `random`, or one word per sequence (`none`: then
    has_initial_state false, and `stale` the same with another tenant's values in its row).
    qk: None keeps the family's own flag; `raw` or `normalised` overrides the flag, not the values.
    draft: makes a verify step of it, with 1 + draft columns of slots per sequence.
    Raises BadInput for any argument that makes no case.
    """
    shape, kinds = _check(family, lengths, k_heads, v_heads, dims, dtype, state, seed)
    for name in (beta_dtype or dtype, state_dtype):
        _dtype(name)
    drawn = FAMILIES[family].generate(shape, Draw(family, seed))
    if qk is not None:
        if qk not in ("raw", "normalised"):
            raise BadInput(f"qk is {qk!r}; use raw or normalised")
        drawn = drawn._replace(qk=qk)
    tensors = _round(drawn, _dtype(dtype), _dtype(beta_dtype or dtype))
    tensors["cu_seqlens"] = torch.tensor([0, *shape.lengths]).cumsum(0)
    tensors |= _states(drawn.state, kinds, _dtype(state_dtype))
    case = Case(
        tensors=tensors,
        options=CallOptions(qk=drawn.qk, scale=drawn.scale),
        origin=Origin(kind="synthetic", family=family, seed=seed),
        fingerprint={"generator": GENERATOR_VERSION},
        finite=all(bool(torch.isfinite(t).all()) for t in tensors.values()),
    )
    return _with_hash(case if draft is None else _as_verify(case, draft))


def _as_verify(case: Case, draft: int) -> Case:
    """The case as one step of speculative decoding."""
    if not _natural(draft, 0):
        raise BadInput(f"draft is {draft!r}; give a number of drafted tokens, 0 or more")
    if max(case.lengths) > 1 + draft:
        raise BadInput(
            f"a sequence has {max(case.lengths)} tokens; a step with a draft of {draft} has up to {1 + draft}"
        )
    family, seed = case.origin.family, case.origin.seed
    tensors = {**case.tensors, **verify_step(case, draft, Draw(f"{family}/verify", seed or 0))}
    tensors.pop("initial_state", None)
    return msgspec.structs.replace(case, op="verify", tensors=tensors)


def _check(
    family: str, lengths: Any, k_heads: int, v_heads: int, dims: Any, dtype: str, state: Any, seed: int
) -> tuple[Shape, list[str]]:
    """Every argument at the door."""
    if family not in FAMILIES:
        raise BadInput(f"family {family!r} is unknown; families: {', '.join(FAMILIES)}")
    if isinstance(lengths, (str, int)) or not lengths or any(not _natural(n, 0) for n in lengths):
        raise BadInput(
            f"lengths is {lengths!r}; give at least one number of tokens, each 0 or more, e.g. 40,1,63"
        )
    for name, value in (("k-heads", k_heads), ("v-heads", v_heads)):
        if not _natural(value, 1):
            raise BadInput(f"{name} is {value!r}; give 1 or more")
    if v_heads % k_heads:
        raise BadInput(f"v-heads is {v_heads}, no multiple of k-heads {k_heads}; give a multiple")
    if isinstance(dims, str) or len(dims) != 2 or any(not _natural(d, 1) for d in dims):
        raise BadInput(f"dims is {dims!r}; give K and V, each 1 or more, e.g. 64,64")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise BadInput(f"seed is {seed!r}; give an integer from 0 to 2^63 - 1")
    elements = max(sum(lengths) * v_heads, len(lengths) * v_heads * dims[0]) * max(dims)
    if elements > MAX_ELEMENTS:
        raise BadInput(
            f"{sum(lengths)} tokens x {v_heads} heads x {max(dims)} is {elements / 2**30:.1f} Gi numbers; "
            "at most 2 Gi are drawn at once: make the case smaller"
        )
    shape = Shape(
        tuple(int(n) for n in lengths), k_heads, v_heads, dims[0], dims[1], LARGEST_INTEGER[_dtype(dtype)]
    )
    return shape, _state_kinds(state, len(lengths))


def _natural(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise BadInput(f"dtype {name!r} is unknown; use bf16, fp16 or fp32")
    return DTYPES[name]


def _state_kinds(state: str | Sequence[str], n_sequences: int) -> list[str]:
    kinds = state.split(",") if isinstance(state, str) else list(state)
    for kind in kinds:
        if kind not in STATES:
            raise BadInput(f"state {kind!r} is unknown; use {', '.join(STATES)}")
    if len(kinds) == 1:
        return kinds * n_sequences
    if len(kinds) != n_sequences:
        raise BadInput(
            f"state has {len(kinds)} entries for {n_sequences} sequences; give one, or one per sequence"
        )
    return kinds


def _round(drawn: Inputs, dtype: torch.dtype, beta_dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "q": drawn.q.to(dtype),
        "k": drawn.k.to(dtype),
        "v": drawn.v.to(dtype),
        "g": drawn.g.float(),
        "beta": drawn.beta.to(beta_dtype),
    }


def _states(drawn: Tensor, kinds: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """initial_state and has_initial_state as the kinds ask for them."""
    if set(kinds) == {"none"}:
        return {}
    filled = torch.tensor([kind in ("random", "stale") for kind in kinds])
    state = torch.where(filled.view(-1, 1, 1, 1), drawn, torch.zeros_like(drawn)).to(dtype)
    has_state = torch.tensor([kind in ("zeros", "random") for kind in kinds])
    tensors = {"initial_state": state}
    if not bool(has_state.all()):
        tensors["has_initial_state"] = has_state
    return tensors


def _with_hash(case: Case) -> Case:
    return msgspec.structs.replace(case, content_hash=hash_of(case))
