"""A candidate: a case with its deviations, and how small it is.

The idea: shrinking is a walk down one order, so that it always ends and never ends higher than it began:
total elements, then deviations from the baseline, then distinct values, then bits of their mantissas, then
entries that are not zero. Only the tensors of the rule count; what a capture holds besides is dropped first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import torch
from torch import Tensor

from ...capture.case import Case
from ..inputs import RULE_TENSORS

TOKEN_TENSORS = ("q", "k", "v", "g", "beta")
KEY_TENSORS = ("q", "k")
VALUE_TENSORS = ("v", "g", "beta")
STATE_TENSORS = ("initial_state", "has_initial_state", "pool", "slot_indices")
# Tensors whose values are simplified; the others are indices and flags.
VALUED = (*TOKEN_TENSORS, "initial_state", "pool")


class Size(msgspec.Struct, frozen=True, order=True):
    """How large a candidate is; compared field by field, in this order."""

    elements: int
    """Of all tensors together."""
    deviations: int
    """Axes that depart from the baseline, a schedule's cuts counted one by one."""
    distinct: int
    """Distinct values, tensor by tensor, added up."""
    bits: int
    """Mantissa bits that these values need, added up."""
    nonzero: int


@dataclass(frozen=True, eq=False)
class Candidate:
    """What may be the smaller one."""

    case: Case
    deviations: dict[str, str] = field(default_factory=dict)
    change: str = ""
    """What was done to the one before, in words."""

    @cached_property
    def size(self) -> Size:
        return size_of(self.case, self.deviations)

    @cached_property
    def elements(self) -> int:
        """Of all tensors together: the first of its size, and the cheap one."""
        return sum(t.numel() for n, t in self.case.tensors.items() if n in RULE_TENSORS)

    def is_smaller_than(self, other: Candidate) -> bool:
        """Whether it stands lower in the order."""
        if self.elements != other.elements:
            return self.elements < other.elements
        return self.size < other.size

    def with_case(self, case: Case, change: str) -> Candidate:
        return Candidate(case, self.deviations, change)

    def with_deviations(self, deviations: dict[str, str], change: str) -> Candidate:
        return Candidate(self.case, deviations, change)


def size_of(case: Case, deviations: dict[str, str]) -> Size:
    """The place of a case and its deviations in the order."""
    tensors = [case[n] for n in RULE_TENSORS if case.get(n) is not None]
    values = [torch.unique(case[n].double()) for n in VALUED if case.get(n) is not None]
    return Size(
        elements=sum(t.numel() for t in tensors),
        deviations=sum(value.count("-") if n == "split" else 1 for n, value in deviations.items()),
        distinct=sum(len(v) for v in values),
        bits=sum(int(mantissa_bits(v).sum()) for v in values),
        nonzero=sum(int(torch.count_nonzero(t)) for t in tensors),
    )


def mantissa_bits(values: Tensor) -> Tensor:
    """[n] float64 -> [n] int64: bits behind the leading one that each value needs; 0 for 0, NaN and Inf."""
    usable = torch.where(torch.isfinite(values), values, torch.zeros_like(values))
    mantissa, _ = torch.frexp(usable)
    # 53 bits as an integer: trailing zeros are those that it does not need.
    whole = (mantissa.abs() * 2.0**53).to(torch.int64)
    lowest = whole & -whole
    trailing = torch.where(whole == 0, 52, torch.log2(lowest.clamp(min=1).double()).round().to(torch.int64))
    return 52 - trailing.clamp(max=52)


def rule_tensors(case: Case) -> Case:
    """The case without what a call of the rule is not given: recorded results, the core's own tensors."""
    dropped: dict[str, Tensor | None] = {n: None for n in case.tensors if n not in RULE_TENSORS}
    return case.with_tensors(**dropped) if dropped else case
