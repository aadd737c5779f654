"""What a relation asks of a kernel: one more call, and which of its rows must equal which rows of the first.

The idea: every relation of tier 4 is the same sentence with other indices, so a relation's file only plans
an `Expectation`, and one comparison (`compare_runs`) serves them all. An expectation also says how to prove
that the changed call was seen: rows that must differ if the kernel read what was changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from ...kernels.interface import RunResult
from ..inputs import Inputs
from ..trial import Trial
from ..verdict import Outcome

Judge = Callable[[Trial, RunResult], Outcome | None]


class Expectation(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One changed call and what must hold of it."""

    relation: str
    """Name in contracts, e.g. `causality`."""
    inputs: Inputs
    """The changed call."""
    what: str
    """What was changed, for the reason: `tokens from 31 on of every sequence`."""
    output_rows: tuple[Tensor, Tensor]
    """([R], [R]) rows of the first call's output and of this call's that must agree."""
    state_rows: tuple[Tensor, Tensor]
    """([S], [S]) sequences whose final states must agree."""
    heads: Tensor | None = None
    """[HV] head of this call that stands for each head of the first; None: the same."""
    factor: float = 1.0
    """This call's result is the first one's times this (a power of two)."""
    changed_rows: Tensor | None = None
    """Rows of this call's output that must differ from the first call's same rows if the change was seen."""
    same_shape: bool = True
    """Both calls have the same shapes, so that a kernel has no reason to take another path."""
    lenient: bool = False
    """Bits may be lost without suspicion: the shapes agree, but places have changed."""
    before: tuple[Inputs, ...] = ()
    """Calls made just before this one, in the same process; their results do not matter."""
    options: dict[str, Any] = {}
    """Fields of `RunOptions` that this call changes."""
    tensors: dict[str, Tensor] | None = None
    """Tensors that this call is given beside or instead of those of `inputs` (a pool, longer buffers)."""
    exercised: int | None = None
    """How much of the change was put in (sequences moved, neighbours' tokens, calls before); with
    `changed_rows` the rows that moved are counted instead."""
    spare_rows: int = 0
    """Rows of nobody behind the last sequence, which an output may have too."""
    proof: str = ""
    """Name of a count among the call's evidence that must not be zero."""
    process: Literal["same", "fresh", "pair"] = "same"
    """`fresh`: in a process of its own; `pair`: twice in a new one, the second compared with the first."""
    judge: Judge | None = None
    """Judges the answer itself, before or (where it gives an Outcome) instead of comparing rows."""
    then: Callable[[RunResult], Expectation] | None = None
    """A further call, made of this one's answer."""
    verb: str = "changed"
    """How the reason speaks of what happened to the agreeing rows."""


# What a relation's file plans: its calls, or why there is nothing to ask of this case.
Plan = list[Expectation] | str


def no_rows(device: torch.device) -> tuple[Tensor, Tensor]:
    """An empty pair of row indices."""
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    return empty, empty


def same_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that keep their place."""
    return rows, rows
