"""The journal of a fuzz run: what was started, what came of it, the corpus and the maxima, in the run store.

The idea: a case's row is there before its call is made, and its verdict as soon as it is known; a window's
feedback is taken in one transaction with the note that it was. So whatever a process dies of, the rows say
which cases were in flight, and a resumed run continues as the first one would have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ..store import RunStore
from .feedback import FEATURES
from .flight import Job
from .generators.generator import CorpusEntry
from .recipe import Recipe, from_json, to_json

STARTED, ALONE, INTERRUPTED = "started", "alone", "interrupted"
"""A case in flight with others; in flight by itself; and one that was, when its process died: it is not run
again."""
UNFINISHED = (STARTED, ALONE)
PRECISION = 4  # digits of a feedback number


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A case as the store has it."""

    number: int
    verdict: str
    recipe: Recipe
    feedback: dict[str, float] = {}
    signature: str | None = None
    """Digest of the raw signature where it failed."""


class Journal:
    """The cases, corpus and tallies of one run; `kernel` is its number in the run's list everywhere."""

    def __init__(self, store: RunStore) -> None:
        self.store = store

    def start(self, kernel: int, jobs: Sequence[Job]) -> None:
        """Note that these are about to run. Call it before they do."""
        word = ALONE if len(jobs) == 1 else STARTED
        with self.store.transaction():
            for job in jobs:
                self.store.execute(
                    "INSERT OR REPLACE INTO cases (kernel, number, verdict, recipe) VALUES (?, ?, ?, ?)",
                    (kernel, job.number, word, to_json(job.recipe)),
                )

    def finish(
        self,
        kernel: int,
        number: int,
        verdict: str,
        *,
        seconds: float = 0.0,
        feedback: Mapping[str, float] | None = None,
        signature: str | None = None,
    ) -> None:
        """Note a verdict."""
        numbers = None
        if feedback:
            numbers = json.dumps([float(f"{feedback[n]:.{PRECISION}g}") for n in FEATURES])
        self.store.execute(
            "UPDATE cases SET verdict = ?, seconds = ?, numbers = ?, signature = ? "
            "WHERE kernel = ? AND number = ?",
            (verdict, round(seconds, 6), numbers, signature, kernel, number),
        )

    def forget(self, kernel: int, numbers: Iterable[int]) -> None:
        """These were not run after all (Ctrl-C): a resumed run makes them again."""
        with self.store.transaction():
            for number in numbers:
                self.store.execute(
                    "DELETE FROM cases WHERE kernel = ? AND number = ? AND verdict IN (?, ?)",
                    (kernel, number, *UNFINISHED),
                )

    def left_over(self, kernel: int, lanes: Iterable[int], n_lanes: int) -> tuple[list[int], list[int]]:
        """(cases that ran alone when their process died, cases in flight with others), ascending.

        The former are marked `interrupted`, not to be met again; the latter are to be run one by one.
        """
        own = set(lanes)
        rows = self.store.execute(
            "SELECT number, verdict FROM cases WHERE kernel = ? AND verdict IN (?, ?) ORDER BY number",
            (kernel, *UNFINISHED),
        ).fetchall()
        mine = [(number, verdict) for number, verdict in rows if number % n_lanes in own]
        alone = [number for number, verdict in mine if verdict == ALONE]
        with self.store.transaction():
            for number in alone:
                self.finish(kernel, number, INTERRUPTED)
        return alone, [number for number, verdict in mine if verdict == STARTED]

    def rows(self, kernel: int, lane: int, n_lanes: int, since: int) -> list[Row]:
        """Cases of a lane from a number on, ascending."""
        found = self.store.execute(
            "SELECT number, verdict, recipe, numbers, signature FROM cases "
            "WHERE kernel = ? AND number >= ? AND number % ? = ? ORDER BY number",
            (kernel, since, n_lanes, lane),
        ).fetchall()
        return [
            Row(
                number=number, verdict=verdict, recipe=from_json(recipe), signature=signature,
                feedback={} if numbers is None else dict(zip(FEATURES, json.loads(numbers), strict=True)),
            )
            for number, verdict, recipe, numbers, signature in found
        ]  # fmt: skip

    def case(self, kernel: int, number: int) -> Row | None:
        """One case."""
        found = [r for r in self.rows(kernel, 0, 1, number)[:1] if r.number == number]
        return found[0] if found else None

    def windows(self, kernel: int) -> dict[int, int]:
        """Lane -> windows whose feedback has been taken."""
        rows = self.store.execute("SELECT lane, done FROM windows WHERE kernel = ?", (kernel,))
        return dict(rows.fetchall())

    def corpus(self, kernel: int, lane: int, *, newest: int) -> list[CorpusEntry]:
        """The newest entries of a lane, ascending."""
        rows = self.store.execute(
            "SELECT number, recipe, reason FROM corpus WHERE kernel = ? AND lane = ? "
            "ORDER BY number DESC LIMIT ?",
            (kernel, lane, newest),
        ).fetchall()
        return [CorpusEntry(number=n, recipe=from_json(r), reason=why) for n, r, why in reversed(rows)]

    def maxima(self, kernel: int, lane: int) -> dict[str, int]:
        rows = self.store.execute(
            "SELECT bucket, value FROM maxima WHERE kernel = ? AND lane = ?", (kernel, lane)
        )
        return {bucket: int(value) for bucket, value in rows}

    def take(
        self, kernel: int, lane: int, done: int, entries: Sequence[CorpusEntry], raised: Mapping[str, int]
    ) -> None:
        """Note a window's feedback, all of it at once."""
        with self.store.transaction():
            for entry in entries:
                self.store.execute(
                    "INSERT OR REPLACE INTO corpus VALUES (?, ?, ?, ?, ?)",
                    (kernel, lane, entry.number, entry.reason, to_json(entry.recipe)),
                )
            for bucket, value in raised.items():
                self.store.execute(
                    "INSERT OR REPLACE INTO maxima VALUES (?, ?, ?, ?)", (kernel, lane, bucket, value)
                )
            self.store.execute("INSERT OR REPLACE INTO windows VALUES (?, ?, ?)", (kernel, lane, done))

    def count(self, amounts: Mapping[str, float]) -> None:
        """Add to the run's tallies."""
        with self.store.transaction():
            for name, amount in amounts.items():
                self.store.execute(
                    "INSERT INTO tallies VALUES ('', ?, ?) "
                    "ON CONFLICT (part, name) DO UPDATE SET value = value + excluded.value",
                    (name, amount),
                )

    def tallies(self) -> dict[str, float]:
        """Name -> sum over all parts of the run."""
        rows = self.store.execute("SELECT name, sum(value) FROM tallies GROUP BY name ORDER BY name")
        return dict(rows.fetchall())
