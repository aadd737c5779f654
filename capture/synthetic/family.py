"""What a family of synthetic cases is: a name, a stated distribution and a function that draws it.

The idea: families draw in float64 and say nothing about dtypes or files; `capture.make` rounds and packs.
So one family serves every dtype, and its documented distribution is what a test can hold it to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor

from .portable import Draw, unit


class Shape(NamedTuple):
    """Sizes of a case to be drawn."""

    lengths: tuple[int, ...]
    k_heads: int
    v_heads: int
    key_dim: int
    value_dim: int
    largest_integer: int
    """Largest m such that every integer up to m is exact in the case's dtype (256 in bf16)."""

    @property
    def n_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def keys(self) -> tuple[int, int, int]:
        return self.n_tokens, self.k_heads, self.key_dim

    @property
    def values(self) -> tuple[int, int, int]:
        return self.n_tokens, self.v_heads, self.value_dim

    @property
    def gates(self) -> tuple[int, int]:
        return self.n_tokens, self.v_heads

    @property
    def states(self) -> tuple[int, int, int, int]:
        return len(self.lengths), self.v_heads, self.key_dim, self.value_dim

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(first row, length) of each sequence."""
        starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        return list(zip(starts, self.lengths, strict=True))


class Inputs(NamedTuple):
    """Drawn float64 tensors, before rounding."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    """[N, HV, K, V]: what `--state random` starts from."""
    qk: Literal["raw", "normalised"] = "normalised"
    scale: float | None = None


class Family(NamedTuple):
    """One row of FAMILIES."""

    summary: str
    """One line: what it is for."""
    keys: str
    """Distribution of q and k: norms and angles."""
    gate: str
    """Distribution of g (natural log)."""
    beta: str
    generate: Callable[[Shape, Draw], Inputs]


def ordinary(shape: Shape, draw: Draw, **changed: object) -> Inputs:
    """The ground that families vary: independent unit q and k, SiLU values, mild decay, beta in (0, 1).

    changed: Inputs fields that replace the ordinary ones.
    """
    fields: dict[str, object] = {
        "q": unit(draw.normal("q", *shape.keys)),
        "k": unit(draw.normal("k", *shape.keys)),
        "v": draw.silu_of_normal("v", *shape.values),
        "g": -draw.uniform("g", *shape.gates, low=0.0, high=0.2),
        "beta": draw.uniform("beta", *shape.gates),
        "state": 0.25 * draw.normal("state", *shape.states),
    }
    return Inputs(**{**fields, **changed})  # type: ignore[arg-type]
