"""Pairs of kernels on one case: how far they are from each other, and how much of that is their contracts.

The idea: two kernels that declare the same clause compute the same function, so the clause cancels in their
difference; a clause of one only does not, and its effect is known (the difference of the two truths). What
is left after taking that away is rounding, or a fault in one of them. The table is no verdict: each kernel
has its own.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from ..kernels.contract import Clause
from .tiles import row_errors
from .trial import TENSORS, Trial


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two kernels on one case; differences are RMS over the RMS of the truth, None where not comparable."""

    case: str
    first: str
    second: str
    difference: dict[str, float | None]
    """Of `output` and `state`, as returned."""
    under_contracts: dict[str, float | None]
    """The same, less what clauses of only one of them explain."""
    shared: tuple[str, ...] = ()
    """Clauses that both declare and that touch this case: they cancel."""
    one_sided: tuple[str, ...] = ()
    """Clauses that only one declares."""


def pairs_of(trials: list[Trial]) -> list[Pair]:
    """Every pair of kernels that answered the same case, in the order given."""
    return [
        _pair(one, other)
        for i, one in enumerate(trials)
        for other in trials[i + 1 :]
        if one.witness is other.witness
    ]


def _pair(one: Trial, other: Trial) -> Pair:
    mine, others = ({_key(c): c for c in t.clauses} for t in (one, other))
    plain: dict[str, float | None] = {}
    under: dict[str, float | None] = {}
    for index, name in enumerate(TENSORS):
        a, b = (getattr(t, name) for t in (one, other))
        if a is None or b is None:
            plain[name] = under[name] = None
            continue
        truth = one.truth[index]
        plain[name] = _relative(a.double() - b.double(), truth)
        rest = (a.double() - truth) - (b.double() - other.truth[index])
        under[name] = _relative(rest, truth) if set(mine) != set(others) else plain[name]
    case = one.witness.case
    return Pair(
        case=str(case.path) if case.path is not None else case.label,
        first=one.info.name,
        second=other.info.name,
        difference=plain,
        under_contracts=under,
        shared=tuple(sorted(set(mine) & set(others))),
        one_sided=tuple(sorted(set(mine) ^ set(others))),
    )


def _key(clause: Clause) -> str:
    return f"{clause.id} {clause.value}"


def _relative(difference: Tensor, truth: Tensor) -> float:
    """RMS over the truth's; NaN where a difference is not finite in entries where the truth is."""
    if bool((torch.isfinite(truth) & ~torch.isfinite(difference)).any()):
        return float("nan")
    size = float(row_errors(truth, truth).truth_square.sum())
    square = float(torch.where(torch.isfinite(difference), difference, 0.0).square().sum())
    if square == 0:
        return 0.0
    return float("inf") if size == 0 else (square / size) ** 0.5
