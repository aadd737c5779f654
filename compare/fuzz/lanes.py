"""Lanes: the numbers of a kernel's cases, dealt so that a case is the same whoever runs it.

The idea: number n belongs to lane n mod LANES, and a lane has a corpus of its own: what a case is mutated
from depends on earlier cases of its lane only, and on those only up to two windows before it. So lanes can be
dealt to shards, runners and machines, and cases run in any order inside two windows, without changing one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .feedback import levels
from .generators.generator import CorpusEntry
from .journal import UNFINISHED, Journal, Row

LANES = 16
PER_WINDOW = 4  # numbers of one lane in a window
AHEAD = 2  # windows that may be open at once; also how old a corpus is that a case sees
# Entries of a lane that its cases may be mutated from, the newest; the rest stays in the store.
SEEN_CORPUS = 256


def lanes_of(shard: tuple[int, int], n_lanes: int = LANES) -> tuple[int, ...]:
    """Lanes of shard (i, n), i from 1."""
    i, n = shard
    return tuple(lane for lane in range(n_lanes) if lane % n == i - 1)


class Lane:
    """One lane of one kernel."""

    def __init__(self, journal: Journal, kernel: int, number: int, done: int) -> None:
        self.journal, self.kernel, self.number, self.done = journal, kernel, number, done
        """done: windows whose feedback has been taken."""
        self.corpus = journal.corpus(kernel, number, newest=SEEN_CORPUS + AHEAD * PER_WINDOW)
        """The newest entries; the rest is in the store."""
        self._snapshots: dict[int, Sequence[CorpusEntry]] = {}
        self.maxima = journal.maxima(kernel, number)
        self.rows: dict[int, Row] = {}
        """Finished cases of windows that are not taken yet."""

    @property
    def span(self) -> int:
        return LANES * PER_WINDOW

    def snapshot(self, number: int) -> Sequence[CorpusEntry]:
        """The corpus that a case sees."""
        window = number // self.span
        if window not in self._snapshots:
            seen = [entry for entry in self.corpus if entry.number // self.span <= window - AHEAD]
            self._snapshots[window] = seen[-SEEN_CORPUS:]
        return self._snapshots[window]

    def is_open(self, number: int) -> bool:
        return number // self.span < self.done + AHEAD

    def finish(self, row: Row) -> None:
        """Take in a finished case; and a window's feedback where it was the last of it."""
        self.rows[row.number] = row
        while self._window_is_full():
            self._take_window()

    def _numbers(self) -> range:
        first = self.done * self.span + self.number
        return range(first, first + self.span, LANES)

    def _window_is_full(self) -> bool:
        return all(number in self.rows for number in self._numbers())

    def _take_window(self) -> None:
        """In the order of numbers, whatever the order in which they came."""
        entries, raised = [], dict[str, int]()
        for number in self._numbers():
            row = self.rows.pop(number)
            higher = {
                bucket: level
                for bucket, level in self._reached(row).items()
                if level > raised.get(bucket, self.maxima.get(bucket, level - 1))
            }
            if higher:
                raised |= higher
                entries.append(
                    CorpusEntry(number=number, recipe=row.recipe, reason=", ".join(sorted(higher)))
                )
        self.journal.take(self.kernel, self.number, self.done + 1, entries, raised)
        self.maxima |= raised
        # A window holds PER_WINDOW entries at most, so what the oldest open one sees is among these.
        self.corpus = [*self.corpus, *entries][-(SEEN_CORPUS + AHEAD * PER_WINDOW) :]
        self.done += 1
        self._snapshots = {w: seen for w, seen in self._snapshots.items() if w >= self.done}

    def _reached(self, row: Row) -> dict[str, int]:
        found = levels(row.recipe, row.feedback)
        if row.signature is not None:
            found[f"signature {row.signature}"] = 0
        return found


class Numbers:
    """Which numbers of one kernel are to be run next, over the lanes of this runner."""

    def __init__(self, journal: Journal, kernel: int, lanes: Iterable[int], limit: int | None) -> None:
        self.limit = limit
        own = tuple(lanes)
        self.interrupted, self.again = journal.left_over(kernel, own, LANES)
        """Cases that are not run again; and those that are run one by one, first of all."""
        windows = journal.windows(kernel)
        self.lanes = {n: Lane(journal, kernel, n, windows.get(n, 0)) for n in own}
        self._taken: set[int] = set(self.again)
        self.finished = 0
        for n, lane in self.lanes.items():
            for row in journal.rows(kernel, n, LANES, lane.done * lane.span):
                self._taken.add(row.number)
                if row.verdict not in UNFINISHED:
                    lane.finish(row)
        self._next = min((lane.done for lane in self.lanes.values()), default=0) * LANES * PER_WINDOW
        self._in_air = 0

    def lane(self, number: int) -> Lane:
        return self.lanes[number % LANES]

    def take(self, count: int) -> list[int]:
        """Up to so many numbers whose windows are open; one that was in flight before comes alone."""
        if self.again:
            return [self.again.pop(0)]
        found: list[int] = []
        number = self._next
        while len(found) < count and (self.limit is None or number < self.limit):
            lane = self.lanes.get(number % LANES)
            if lane is not None and number not in self._taken and number >= lane.done * lane.span:
                if not lane.is_open(number):
                    break
                found.append(number)
                self._taken.add(number)
            number += 1
        self._next = number
        self._taken = {n for n in self._taken if n >= self._oldest()}
        return found

    def _oldest(self) -> int:
        return min(lane.done * lane.span for lane in self.lanes.values())

    @property
    def exhausted(self) -> bool:
        """Nothing is left to be taken (what was taken may still be in the air)."""
        return not self.again and self.limit is not None and self._next >= self.limit

    def finish(self, row: Row) -> None:
        self.lane(row.number).finish(row)
