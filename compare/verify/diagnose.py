"""What a wrong verify step looks like: which one mistake of bookkeeping explains what came back.

The idea: a step that reads or writes the wrong slot still computes a right recurrence somewhere. So the
answer is compared with the truth from every other start (each slot of the pool, zeros), and each column's
content with the true state after every token of every sequence. An explanation must be near, and much
nearer than the right answer is; else nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...capture.case import Case, starting_state
from ...capture.columns import accepted_of, columns_of, start_slots
from ...reference.recurrence import recurrence
from ..axes.recase import rule_only

# A guess is near where it is within this relative distance, and this much nearer than the truth.
NEAR, NEARER = 0.05, 0.2


@dataclass(frozen=True)
class _Step:
    """One step, and what is true of it."""

    case: Case
    columns: Tensor
    """[N, C]."""
    start: Tensor
    """[N]."""
    output: Tensor
    """[T, HV, V] true."""
    states: Tensor
    """[T, HV, K, V] true state after each packed token."""

    def rows(self, sequence: int) -> slice:
        at = self.case["cu_seqlens"]
        return slice(int(at[sequence]), int(at[sequence + 1]))


def looks_like(case: Case, outputs: Mapping[str, Tensor]) -> str:
    """The mistake in words, or nothing."""
    whole = rule_only(case)
    output, _, states = _true(whole, starting_state(case))
    step = _Step(case, columns_of(case.tensors).cpu(), start_slots(case.tensors).cpu(), output, states)
    got, pool = outputs["output"].cpu().double(), outputs["pool"].cpu().double()
    for sequence in range(case.n_sequences):
        rows = step.rows(sequence)
        if rows.start == rows.stop or int(step.start[sequence]) < 0:
            continue
        if _distance(got[rows], step.output[rows]) > NEAR and (guess := _wrong_start(step, got, sequence)):
            return guess
    for sequence in range(case.n_sequences):
        if guess := _wrong_column(step, pool, sequence):
            return guess
    return _stray_write(step, pool)


def _true(case: Case, start: Tensor | None) -> tuple[Tensor, ...]:
    return recurrence(
        case["q"], case["k"], case["v"], case["g"], case["beta"], scale=case.scale, initial_state=start,
        cu_seqlens=case["cu_seqlens"], l2norm=case.options.qk == "raw", return_states=True,
    )  # fmt: skip


def _distance(a: Tensor, b: Tensor) -> float:
    """Relative, and infinite where a is not finite; NaN never comes near."""
    found = float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
    return float("inf") if found != found else found


def _nearest(candidates: list[Tensor], got: Tensor, own: float) -> int | None:
    """Index of the candidate that explains `got`, which is `own` away from the right answer."""
    distances = [_distance(got, candidate) for candidate in candidates]
    best = min(range(len(distances)), key=distances.__getitem__, default=None)
    if best is None or distances[best] > min(NEAR, NEARER * own):
        return None
    return best


def _wrong_start(step: _Step, got: Tensor, sequence: int) -> str:
    """The sequence's outputs are right from another state than its own."""
    rows = step.rows(sequence)
    pool = step.case["pool"].double()
    starts = torch.cat([pool, torch.zeros_like(pool[:1])])
    one = rule_only(step.case)
    n = rows.stop - rows.start
    copies = {name: one[name][rows].repeat(len(starts), *[1] * (one[name].dim() - 1)) for name in TOKENS}
    several = one.with_tensors(
        **copies, cu_seqlens=torch.arange(len(starts) + 1) * n, initial_state=None, has_initial_state=None
    )
    output, _, _ = _true(several, torch.nan_to_num(starts))
    candidates = list(output.view(len(starts), n, *output.shape[1:]))
    own = _distance(got[rows], step.output[rows])
    best = _nearest(candidates, got[rows], own)
    if best is None:
        return ""
    right, accepted = int(step.start[sequence]), int(accepted_of(step.case.tensors)[sequence])
    should = f"not from slot {right} (column {accepted - 1}: {accepted} accepted)"
    if best == len(starts) - 1:
        return f"sequence {sequence} starts from zeros, {should}"
    return f"sequence {sequence} starts from slot {best} ({_owner(step, best)}), {should}"


def _wrong_column(step: _Step, pool: Tensor, sequence: int) -> str:
    """A column of the sequence holds the state after another token, or what it held before."""
    rows = step.rows(sequence)
    if int(step.start[sequence]) < 0:
        return ""
    for column, row in enumerate(range(rows.start, rows.stop)):
        slot = int(step.columns[sequence, column])
        if slot < 0:
            continue
        own = _distance(pool[slot], step.states[row])
        if own <= NEAR:
            continue
        if _distance(pool[slot], step.case["pool"][slot]) == 0.0:
            return f"column {column} of sequence {sequence} (slot {slot}) was not written"
        found = _nearest(list(step.states), pool[slot], own)
        if found is not None:
            return f"column {column} of sequence {sequence} (slot {slot}) holds {_token(step, found)}"
    return ""


def _stray_write(step: _Step, pool: Tensor) -> str:
    """A slot that changed without an owner holds some token's state."""
    before = step.case["pool"].double()
    for slot in range(len(before)):
        changed = _distance(pool[slot], before[slot])
        owner = (step.columns == slot).nonzero()
        lengths = [step.rows(n).stop - step.rows(n).start for n in range(step.case.n_sequences)]
        if changed == 0.0 or any(int(c) < lengths[int(n)] for n, c in owner):
            continue
        found = _nearest(list(step.states), pool[slot], changed)
        if found is not None:
            return f"{_token(step, found)} was written to slot {slot} ({_owner(step, slot)})"
    return ""


def _token(step: _Step, row: int) -> str:
    at = step.case["cu_seqlens"]
    sequence = int((at[1:] <= row).sum())
    return f"the state after token {row - int(at[sequence])} of sequence {sequence}"


def _owner(step: _Step, slot: int) -> str:
    found = (step.columns == slot).nonzero()
    if len(found) == 0:
        return "nobody's"
    sequence, column = found[0].tolist()
    return f"column {column} of sequence {sequence}"


TOKENS = ("q", "k", "v", "g", "beta")
