"""The shortest history that still shows a failure: steps first, then rows, then tokens.

The idea: every list of steps is a history (`legal`), and a token's inputs do not depend on what else happens
(`tokens`), so delta debugging can take steps away at will. Then each call that is left loses the rows that it
does not need, and each row its tokens. What must stay is the broken rule, not the wording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from ..sweep.ddmin import ddmin
from .legal import sensible
from .steps import Arrive, Call, History, Prefill, Row, Step, Verify

Fails = Callable[[History], bool]
MOST_PASSES = 4


def shrink(history: History, fails: Fails, *, last: int | None = None) -> History:
    """A history that fails and none of whose steps, rows or tokens can be taken away.

    fails: whether a history still fails the same way; `history` does. last: the step (from 1) at which it
    failed, after which nothing matters.
    """
    kept = sensible(history.with_steps(history.steps[:last]))
    known: dict[tuple[Step, ...], bool] = {}

    def still(steps: list[Step]) -> bool:
        tried = sensible(kept.with_steps(tuple(steps)))
        if tried.steps not in known:
            known[tried.steps] = bool(tried.steps) and fails(tried)
        return known[tried.steps]

    steps = ddmin(list(kept.steps), still)
    for _ in range(MOST_PASSES):
        smaller = _merged(_earlier(_one_pass(steps, still), still), still)
        if smaller == steps:
            break
        steps = ddmin(smaller, still)
    return sensible(kept.with_steps(tuple(steps)))


def _one_pass(steps: list[Step], still: Callable[[list[Step]], bool]) -> list[Step]:
    """Make each call as small as it goes, one after the other."""
    for number in range(len(steps)):
        progress = True
        while progress:
            progress = False
            for smaller in _smaller(steps[number]):
                tried = [*steps[:number], smaller, *steps[number + 1 :]]
                if still(tried):
                    steps, progress = tried, True
                    break
    return steps


def _earlier(steps: list[Step], still: Callable[[list[Step]], bool]) -> list[Step]:
    """Move every row into the earliest call that it fits, so that calls that are left alone can be merged."""
    for j in range(len(steps)):
        for i in range(j):
            target, source = steps[i], steps[j]
            if not isinstance(target, Call) or not isinstance(source, Call):
                continue
            for row in source.rows if len(source.rows) > 1 else ():
                if any(r.sequence == row.sequence for r in target.rows):
                    continue
                fuller = msgspec.structs.replace(target, rows=(*target.rows, row))
                rest = msgspec.structs.replace(source, rows=tuple(r for r in source.rows if r is not row))
                tried = [fuller if n == i else rest if n == j else step for n, step in enumerate(steps)]
                if still(tried):
                    return _earlier(tried, still)
    return steps


def _merged(steps: list[Step], still: Callable[[list[Step]], bool]) -> list[Step]:
    """Put arrivals, and calls of different sequences, into one step where the failure stays."""
    pairs = [(i, j) for j in range(len(steps)) for i in range(j)]
    for i, j in pairs:
        joined = _joined(steps[i], steps[j])
        if joined is None:
            continue
        for at, left_out in ((i, j), (j, i)):
            tried = [joined if n == at else step for n, step in enumerate(steps) if n != left_out]
            if still(tried):
                return _merged(tried, still)
    return steps


def _joined(first: Step, second: Step) -> Step | None:
    if isinstance(first, Arrive) and isinstance(second, Arrive):
        return Arrive(sequences=first.sequences + second.sequences)
    if not isinstance(first, Call) or not isinstance(second, Call):
        return None
    if {r.sequence for r in first.rows} & {r.sequence for r in second.rows}:
        return None
    larger = max(first, second, key=lambda call: call.padded)
    return msgspec.structs.replace(larger, rows=first.rows + second.rows)


def _smaller(step: Step) -> Iterator[Step]:
    """A call with a row, some tokens or a padded row less, the boldest cuts first."""
    if isinstance(step, Arrive):
        for sequence in step.sequences if len(step.sequences) > 1 else ():
            yield Arrive(sequences=tuple(s for s in step.sequences if s != sequence))
    if not isinstance(step, Call):
        return
    for padded in dict.fromkeys((0, 1)):
        if padded < step.padded:
            yield msgspec.structs.replace(step, padded=padded)
    for i in range(len(step.rows)):
        if len(step.rows) > 1:
            yield msgspec.structs.replace(step, rows=step.rows[:i] + step.rows[i + 1 :])
    for i, row in enumerate(step.rows):
        for fewer in _fewer(row):
            yield msgspec.structs.replace(step, rows=(*step.rows[:i], fewer, *step.rows[i + 1 :]))


def _fewer(row: Row) -> Iterator[Row]:
    if isinstance(row, Prefill):
        for tokens in dict.fromkeys((1, 2, row.tokens // 2, row.tokens - 1)):
            if 0 < tokens < row.tokens:
                yield msgspec.structs.replace(row, tokens=tokens)
    if isinstance(row, Verify):
        for draft, accepted in ((1, 0), (1, 1), (row.draft - 1, row.accepted), (row.draft, 0)):
            smaller = (draft, min(accepted, draft)) < (row.draft, row.accepted)
            if draft >= 1 and smaller:
                yield msgspec.structs.replace(row, draft=draft, accepted=min(accepted, draft))
    elif row.keep:
        yield msgspec.structs.replace(row, keep=False)
