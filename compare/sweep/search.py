"""The search on one kernel and one case: try configurations in order, remember every answer, keep it on disk.

The idea: an answer depends on the configuration alone (a process is warmed the same way each time), so each
is asked for once, in memory or in the store of a run that was interrupted; the search reads the same either
way.

Leaves to others: running and judging (`kernel_runs`), the order (`plan`), explaining a failure (`explain`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import msgspec

from ..jsonout import plain_numbers
from ..store import RunStore
from .attempt import Attempt
from .configuration import Configuration, configuration_of, in_words, key_of
from .ddmin import ddmin
from .kernel_runs import KernelRuns
from .plan import Covering, Plan, product, product_size, singles

Say = Callable[[str, int, int | None], None]
DONE = ("pass", "suspect")


class Search:
    """What was tried of one kernel on one case."""

    def __init__(
        self,
        runs: KernelRuns,
        plan: Plan,
        *,
        case_digest: str,
        store: RunStore | None = None,
        deadline: float = float("inf"),
        say: Say | None = None,
    ) -> None:
        self.runs, self.plan, self.store, self.deadline = runs, plan, store, deadline
        self.baseline: Configuration = runs.baseline
        self.case_digest = case_digest
        self.attempts: list[Attempt] = []
        """In the order tried; each configuration once, confirmations left out."""
        self.untried = 0
        """Configurations that the budget did not reach."""
        self._known: dict[tuple[str, bool], Attempt] = {}
        self._say = say or (lambda text, done, total: None)
        self._spent, self._timed = 0.0, 0

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def attempt(self, configuration: Configuration, *, fresh: bool = False) -> Attempt:
        """The answer for a configuration, asked for once."""
        key = (key_of(configuration), fresh)
        if key not in self._known:
            found = self._stored(key) or self._asked(configuration, key)
            self._known[key] = found
            if not fresh:
                self.attempts.append(found)
        return self._known[key]

    def knows(self, configuration: Configuration) -> bool:
        """Whether the answer costs no run."""
        return (key_of(configuration), False) in self._known

    def _asked(self, configuration: Configuration, key: tuple[str, bool]) -> Attempt:
        started = time.monotonic()
        found = self.runs.attempt(configuration, fresh=key[1])
        self._spent, self._timed = self._spent + time.monotonic() - started, self._timed + 1
        if self.store is not None:
            document = json.dumps(plain_numbers(msgspec.to_builtins(found, enc_hook=repr)))
            self.store.put(
                self._row(key), kernel=found.kernel, case=found.case, verdict=found.verdict,
                seconds=found.seconds, document=document,
            )  # fmt: skip
        return found

    def _stored(self, key: tuple[str, bool]) -> Attempt | None:
        document = None if self.store is None else self.store.get(self._row(key))
        return None if document is None else msgspec.convert(json.loads(document), Attempt, strict=False)

    def _row(self, key: tuple[str, bool]) -> str:
        """The store's key: everything that the answer depends on."""
        how = "fresh" if key[1] else "shared"
        situation = self.runs.situation
        return json.dumps([self.runs.info.name, self.case_digest, situation.seed, how, json.loads(key[0])])

    def with_deviations(self, deviations: dict[str, str], *, fresh: bool = False) -> Attempt:
        """The answer for the baseline with some axes changed."""
        return self.attempt(configuration_of(deviations, self.baseline), fresh=fresh)

    def run(self, depth: str) -> None:
        """Try what the depth asks for, until the budget is used up."""
        ordered = list(singles(self.plan, self.baseline))
        first = self._tell(ordered[0], 0, len(ordered))
        if first.verdict == "out-of-contract":
            self.untried = len(ordered) - 1
            return
        for number, configuration in enumerate(ordered[1:], start=1):
            if self.late:
                self.untried += len(ordered) - number
                return
            self._tell(configuration, number, len(ordered))
        if depth == "2":
            self._pairs(len(ordered))
        elif depth == "full":
            self._product(len(ordered))

    def _tell(self, configuration: Configuration, done: int, total: int | None) -> Attempt:
        deviations = {n: v for n, v in configuration.items() if v != self.baseline[n]}
        left = ""
        if self._timed and total is not None:
            left = f", about {_duration((total - done) * self._spent / self._timed)} left"
        count = "" if total is None else f" [{done + 1} of {total}{left}]"
        self._say(f"{self.runs.info.name}: {in_words(deviations)}{count}", done, total)
        return self.attempt(configuration)

    def _pairs(self, done: int) -> None:
        """Rows of a covering array over the changes that pass by themselves."""
        alone = {
            next(iter(a.deviations.items()))
            for a in self.attempts
            if len(a.deviations) == 1 and a.verdict not in DONE
        }
        covering = Covering(self.plan.changes, without=alone)
        rows = covering.rows()
        for number, row in enumerate(rows):
            if self.late:
                self.untried += len(covering.missing) + len(covering.alone)
                return
            found = self._tell(configuration_of(row, self.baseline), done + number, None)
            if found.verdict == "skipped":
                covering.again(row)
            elif found.failed:
                # The changes to blame hide what else the row would have shown: try it without each of them.
                blamed = self.minimal(found).deviations
                covering.forbid(blamed)
                rests = ({n: v for n, v in row.items() if n != name} for name in blamed)
                covering.alone += [rest for rest in rests if len(rest) > 1]

    def _product(self, done: int) -> None:
        total = product_size(self.plan)
        for number, configuration in enumerate(product(self.plan, self.baseline), start=done):
            if self.late:
                self.untried += total - number
                return
            self._tell(configuration, number, total)

    def minimal(self, failing: Attempt) -> Attempt:
        """The failing configuration with the fewest deviations that still fails in the same kind."""
        items = list(failing.deviations.items())

        def fails(part: list[tuple[str, str]]) -> bool:
            return self.with_deviations(dict(part)).kind == failing.kind

        if len(items) < 2:
            # A single change is tried after the baseline, which decides.
            return self.with_deviations({}) if items and fails([]) else failing
        return self.with_deviations(dict(ddmin(items, fails)))

    def in_order(self) -> Iterator[Attempt]:
        """What was tried: fewest deviations first, then as tried."""
        yield from sorted(self.attempts, key=lambda a: len(a.deviations))


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
