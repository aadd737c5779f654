"""How often a candidate is run before it is believed: once, or by a sequential test of a flaky failure.

The idea: where the start fails every time, one failing run of a candidate is proof and one passing run is
enough to drop it. Where it fails at a rate, Wald's test (`statistics.SequentialTest`) runs a candidate until
it fails at least half as often, or at most a tenth as often, as the start did; what that may cost is known
before the first candidate.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ..statistics import SequentialTest, rate_interval
from ..sweep.attempt import Attempt

# Runs of the start before it is said not to fail, and after its first failure to measure the rate.
MOST_FIRST_RUNS, RATE_RUNS, STEADY_RUNS = 60, 40, 5
# Above this rate a failure counts as one that is always there; a candidate gets a second run.
STEADY_RATE = 0.9


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """How often the failure shows."""

    failures: int
    runs: int

    @property
    def value(self) -> float:
        return self.failures / self.runs if self.runs else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Two-sided Clopper-Pearson at 95 %."""
        return rate_interval(self.failures, self.runs)

    @property
    def steady(self) -> bool:
        return self.value >= STEADY_RATE

    @property
    def most_runs(self) -> int:
        """Runs of one candidate, at most."""
        if self.value == 1.0:
            return 1
        if self.steady:
            return 2
        return 2 * self.test().clean_runs_to_reject

    @property
    def clean_runs(self) -> int:
        """Passing runs, and nothing else, after which a candidate is dropped."""
        if self.steady:
            return self.most_runs
        return self.test().clean_runs_to_reject

    def test(self) -> SequentialTest:
        return SequentialTest.for_rate(self.value)

    def in_words(self) -> str:
        if self.value == 1.0:
            return f"fails every time ({self.runs} runs)"
        low, high = self.interval
        return f"fails in {self.failures} of {self.runs} runs (95 % interval {low:.3g} to {high:.3g})"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a candidate."""

    same: bool
    """It shows the failure, about as often as the start."""
    shown: Attempt | None = None
    """A run that showed it."""
    other: Attempt | None = None
    """A run that did not."""
    runs: int = 0
    failures: int = 0
    decided: bool = True
    """False where the runs or the time ended first."""


def ask(
    see: Callable[[], Attempt], is_same: Callable[[Attempt], bool], rate: Rate, late: Callable[[], bool]
) -> Answer:
    """Run a candidate as often as the rate asks for. late: whether to stop before a decision."""
    test = None if rate.steady else rate.test()
    shown = other = None
    runs = failures = 0
    while runs < rate.most_runs:
        if runs and late():
            return Answer(same=False, shown=shown, other=other, runs=runs, failures=failures, decided=False)
        attempt = see()
        same = is_same(attempt)
        runs, failures = runs + 1, failures + same
        shown, other = (attempt, other) if same else (shown, attempt)
        if test is None:
            if same:
                break
            continue
        if test.add(same) != "go on":
            break
    kept = failures > 0 if test is None else test.decision == "keeps"
    return Answer(same=kept, shown=shown, other=other, runs=runs, failures=failures)


def measure(
    see: Callable[[], Attempt],
    is_same: Callable[[Attempt], bool],
    late: Callable[[], bool],
    *,
    first_runs: int = MOST_FIRST_RUNS,
) -> tuple[Rate, Attempt | None, Attempt | None]:
    """The start's rate, a run that shows the failure, and one that does not."""
    shown = other = None
    failures = runs = 0
    target = first_runs
    while runs < target and not (runs and late()):
        attempt = see()
        same = is_same(attempt)
        runs, failures = runs + 1, failures + same
        shown, other = (attempt, other) if same else (shown, attempt)
        if failures and target == first_runs:
            target = STEADY_RUNS
        if failures and failures < runs:
            target = max(RATE_RUNS, runs)
    return Rate(failures=failures, runs=runs), shown, other
