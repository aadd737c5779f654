"""Tolerances that a caller insists on: which tensor is judged by them, and by how much.

The idea: a tolerance replaces tiers 2 and 3 for the tensors that it names and for no other; a plain number
names them all. A verdict reached so is marked (`Ruling.by_tolerance`), because it is a choice and no rule.
Judging by them is `checks.tolerance`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from ..capture.errors import BadInput

TENSORS = ("output", "state")
Given = float | Mapping[str, float] | None


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """|got - truth| <= atol + rtol |truth|, entry by entry."""

    atol: float = 0.0
    rtol: float = 0.0


def tolerances(atol: Given, rtol: Given) -> dict[str, Tolerance]:
    """Tensor -> its tolerance, for the tensors that either argument names; a number names both.

    Raises BadInput for an unknown tensor, or a value that is negative or not finite.
    """
    by_tensor: dict[str, dict[str, float]] = {}
    for kind, given in (("atol", atol), ("rtol", rtol)):
        if given is None:
            continue
        named = given if isinstance(given, Mapping) else dict.fromkeys(TENSORS, given)
        for tensor, value in named.items():
            if tensor not in TENSORS:
                raise BadInput(f"{kind} names {tensor!r}; the tensors are {', '.join(TENSORS)}")
            if not (0 <= value < math.inf):
                raise BadInput(f"{kind} of {tensor} is {value}; give a finite number, 0 or more")
            by_tensor.setdefault(tensor, {})[kind] = float(value)
    return {name: Tolerance(**by_tensor[name]) for name in TENSORS if name in by_tensor}


def parse(kind: str, values: Iterable[str]) -> Given:
    """What a command line says, e.g. `1e-3`, or `1e-3` and `state=1e-5`: a later word overrides.

    kind: atol or rtol, for the message. None where there is nothing. Raises BadInput with the offending word.
    """
    found: dict[str, float] = {}
    for word in values:
        tensor, named, text = word.rpartition("=")
        try:
            value = float(text)
            if named and not tensor:
                raise ValueError("no tensor before the sign")
        except ValueError:
            raise BadInput(f"--{kind} {word}: give a number, or TENSOR=NUMBER such as output=1e-3") from None
        found |= {tensor: value} if tensor else dict.fromkeys(TENSORS, value)
    return found or None


def words(tolerance: Tolerance) -> str:
    """`atol 0.001, rtol 0`."""
    return f"atol {tolerance.atol:.3g}, rtol {tolerance.rtol:.3g}"
