"""Whose state was it: what a wrong state would be right for.

The idea: a kernel that reads another slot than it was told computes the rule well, from the wrong start. So
the row's call is run again, in float64, from every other slot of the pool and from zero; the start from which
the kernel's own state follows (far better than from the right one) is named, with the slot's history. It is
a hypothesis, said after the verdict, and no part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...reference.recurrence import recurrence
from .bookkeeping import RowPlan
from .books import Books
from .machine import Group

# The state must be this many times nearer to what another start gives than to its own truth.
NEARER = 20.0


def whose_state(judged: Sequence[Any], row: RowPlan, before: Tensor, after: Tensor, books: Books) -> str:
    """`; the state is what slot 2, last written at step 3 by sequence 1, would give`, or nothing.

    judged: (group, ...) of the call. before, after: [slots, HV, K, V] the pool around it.
    """
    group, number = _group_of(judged, row)
    if group is None:
        return ""
    end = group.lengths[number] if len(row.writes) == 1 else 1
    got = after[row.writes[0]].double()
    if not bool(torch.isfinite(got).all()):
        return ""
    at = int(group.offsets[number])
    part: dict[str, Any] = {name: group.tensors[name][at : at + end] for name in ("q", "k", "v", "g", "beta")}

    def distance(start: Tensor) -> float:
        made: Any = recurrence(**part, initial_state=start[None])
        return float((made[1][0] - got).norm())

    own = distance(torch.zeros_like(got) if row.fresh else before[row.read].double())
    starts = {f"slot {s}, {books.state.entries[s].words}": before[s].double() for s in range(len(before))}
    starts["zero"] = torch.zeros_like(got)
    finite = {name: start for name, start in starts.items() if bool(torch.isfinite(start).all())}
    name, nearest = min(((n, distance(s)) for n, s in finite.items()), key=lambda pair: pair[1])
    if nearest * NEARER > own:
        return ""
    return f"; it looks as if it started from {name}"


def _group_of(judged: Sequence[Any], row: RowPlan) -> tuple[Group | None, int]:
    for group, *_ in judged:
        for number, mine in enumerate(group.rows):
            if mine is row:
                return group, number
    return None, 0
