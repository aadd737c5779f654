"""Explain the first failure: confirmed in a fresh process, reduced, with its nearest passing neighbour.

The idea: "first" is worth naming only if it is there again in a process that did nothing else, if no change
can be taken away from it, and if the configuration next to it passes; the shortest input and a way round it
are what a person does with the answer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from ..axes.recase import shortened
from ..axes.rounding import casts_of, word_for
from ..axes.table import AXES
from ..store import Signature
from .attempt import Attempt, Kind
from .ddmin import ddmin, smallest_failing
from .search import Search

KINDS: tuple[Kind, ...] = ("nonfinite", "wrong", "error")
# Failures that did not come again in a fresh process, before the search gives up confirming.
UNCONFIRMED_TRIES = 12
NEIGHBOURS = 12
CONFIRMED_NEIGHBOURS = 3
WORK_AROUNDS = 8
# Tried beside a deviation; where the baseline itself fails, every change has been tried already.
FIRST_WORK_AROUNDS = ("chunk_size", "l2norm", "autotune")
# Seconds that the bisection over tokens may take.
BISECT_SECONDS = 60.0
WHICH_CALL = re.compile(r"^call \d+ of \d+: ")
DIRECTORIES = re.compile(r"\S*/(?=[^/\s]+)")
NUMBERS = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?(?:e[+-]?\d+)?")
ERROR_WORDS = 80  # characters of an error's message that tell it from another one


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The first failure of one kind, explained."""

    kind: Kind
    attempt: Attempt
    """The minimal configuration, as it failed in a fresh process (or in the shared one, if not confirmed)."""
    confirmed: bool
    """It failed the same way in a process of its own."""
    found_as: dict[str, str]
    """Deviations of the configuration that showed it first."""
    neighbour: Attempt | None = None
    """The nearest configuration that passes, run in a fresh process."""
    change: dict[str, str] = {}
    """What the neighbour does otherwise: {axis: value}."""
    smallest_tokens: int | None = None
    """Fewest first tokens of every sequence at which it still happens."""
    smallest_is_exact: bool = False
    """One token fewer was seen to pass."""
    work_around: tuple[dict[str, str], ...] = ()
    """Changes an engine could make that pass: [{axis: value}]."""
    cast_points: tuple[str, ...] = ()
    """For a rounding: the fewest cast points that still fail."""
    not_reproduced: tuple[dict[str, str], ...] = ()
    """Deviations of configurations before it that failed once and not again in a fresh process."""

    def signature(self, version: str | None, chunk_size: int | None) -> Signature:
        """What makes this the same failure elsewhere."""
        a, place = self.attempt, self.attempt.place
        return Signature(
            kernel=a.kernel,
            version=version,
            tier=a.tier,
            class_="error" if self.kind == "error" else place.class_ if place is not None else "wrong",
            stage=None if place is None else place.tensor,
            deviations=a.deviations,
            place_pattern=pattern(a, chunk_size),
        )


def pattern(attempt: Attempt, chunk_size: int | None) -> str:
    """A place without the numbers of the case: which side of a chunk, whose sequence."""
    place = attempt.place
    if place is None:
        if attempt.verdict == "timeout":
            return "no answer in time"
        return words_of(attempt.reason) if attempt.verdict == "error" else "no place"
    parts = []
    if place.sequence is not None and attempt.own_sequences:
        parts.append("own sequence" if place.sequence in attempt.own_sequences else "neighbour")
    if place.token is not None and chunk_size:
        at = place.token % chunk_size
        sides = {0: "first of a chunk", chunk_size - 1: "last of a chunk"}
        parts.append(f"token {sides.get(at, 'inside a chunk')}")
    return ", ".join(parts) or "anywhere"


def words_of(message: str) -> str:
    """An error's message without what changes from run to run: directories, numbers, its tail."""
    return NUMBERS.sub("#", DIRECTORIES.sub("", WHICH_CALL.sub("", message)))[:ERROR_WORDS]


def findings_of(search: Search) -> list[Finding]:
    """The first failure of each kind, explained, in the order of KINDS."""
    found = (_first(search, kind) for kind in KINDS)
    return [one for one in found if one is not None]


def _first(search: Search, kind: Kind) -> Finding | None:
    failing = [a for a in search.in_order() if a.kind == kind]
    if not failing:
        return None
    lost: list[dict[str, str]] = []
    for candidate in failing[:UNCONFIRMED_TRIES]:
        blamed = search.minimal(candidate)
        for reduced in [blamed, candidate] if blamed is not candidate else [candidate]:
            again = search.attempt(reduced.config, fresh=True)
            if again.kind == kind:
                found = _explained(search, again, candidate)
                return msgspec.structs.replace(found, not_reproduced=tuple(lost))
        lost.append(candidate.deviations)
    first = failing[0]
    return Finding(
        kind=kind, attempt=first, confirmed=False, found_as=first.deviations, not_reproduced=tuple(lost[1:])
    )


def _explained(search: Search, attempt: Attempt, candidate: Attempt) -> Finding:
    assert attempt.kind is not None
    neighbour = _neighbour(search, attempt)
    tokens, exact = (None, False) if attempt.kind == "error" else _smallest(search, attempt)
    change = {} if neighbour is None else _change(attempt, neighbour)
    return Finding(
        kind=attempt.kind,
        attempt=attempt,
        confirmed=True,
        found_as=candidate.deviations,
        neighbour=neighbour,
        change=change,
        smallest_tokens=tokens,
        smallest_is_exact=exact,
        work_around=tuple(_work_arounds(search, attempt)),
        cast_points=_cast_points(search, attempt),
    )


def _change(attempt: Attempt, neighbour: Attempt) -> dict[str, str]:
    return {n: v for n, v in neighbour.config.items() if attempt.config[n] != v}


def _near(search: Search, attempt: Attempt) -> Iterator[dict[str, str]]:
    """Configurations one change away: first without one of the deviations, then with another value."""
    for name in attempt.deviations:
        yield {**attempt.config, name: search.baseline[name]}
    for name, values in search.plan.changes.items():
        for value in values:
            if value != attempt.config[name]:
                yield {**attempt.config, name: value}


def _neighbour(search: Search, attempt: Attempt) -> Attempt | None:
    """The first configuration one change away that passes, here and in a fresh process."""
    asked = passing = 0
    for configuration in _near(search, attempt):
        asked += not search.knows(configuration)
        if asked > NEIGHBOURS:
            return None
        if search.attempt(configuration).verdict != "pass":
            continue
        again = search.attempt(configuration, fresh=True)
        if again.verdict == "pass":
            return again
        passing += 1
        if passing >= CONFIRMED_NEIGHBOURS:
            return None
    return None


def _smallest(search: Search, attempt: Attempt) -> tuple[int | None, bool]:
    """Fewest first tokens of every sequence at which the configuration fails in the same kind."""
    situation = search.runs.situation
    longest = max(situation.case.lengths, default=0)
    if longest < 2:
        return (longest or None), True
    stop = time.monotonic() + BISECT_SECONDS

    def fails(n_tokens: int) -> bool:
        if time.monotonic() > stop:
            return False
        shorter = msgspec.structs.replace(situation, case=shortened(situation.case, n_tokens))
        return search.runs.on(shorter).attempt(attempt.config).kind == attempt.kind

    place = attempt.place
    guess = None if place is None or place.token is None else place.token + 1
    tokens, exact = smallest_failing(fails, longest, guess=guess)
    return tokens, exact and time.monotonic() <= stop


def _work_arounds(search: Search, attempt: Attempt) -> Iterator[dict[str, str]]:
    """Changes that an engine could make and that pass; what was tried already costs nothing."""
    asked = 0
    for name, values in search.plan.changes.items():
        if not AXES[name].work_around or (attempt.deviations and name not in FIRST_WORK_AROUNDS):
            continue
        for value in [search.baseline[name], *values]:
            if value == attempt.config[name] or asked >= WORK_AROUNDS:
                continue
            configuration = {**attempt.config, name: value}
            asked += not search.knows(configuration)
            if search.attempt(configuration).verdict == "pass":
                yield {name: value}


def _cast_points(search: Search, attempt: Attempt) -> tuple[str, ...]:
    """The fewest cast points of a failing rounding that still fail."""
    value = attempt.config.get("rounding", "native")
    casts = casts_of(value)
    if "rounding" not in attempt.deviations or len(casts) < 2:
        return ()

    def fails(points: list[str]) -> bool:
        if not points:
            return False  # no cast point is the native rounding, which the neighbour shows to pass
        word = word_for({point: casts[point] for point in points})
        return search.runs.attempt({**attempt.config, "rounding": word}).kind == attempt.kind

    return tuple(ddmin(list(casts), fails))


def as_document(finding: Finding) -> dict[str, Any]:
    """Plain data of a finding, for the store."""
    plain: dict[str, Any] = msgspec.to_builtins(finding, enc_hook=repr)
    return plain
