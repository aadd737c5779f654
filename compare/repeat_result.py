"""What repeats found out, as values: runs, the kinds of answers among them, and what the counts allow to say.

The idea: only runs and kinds are stored; every rate, interval and number of runs still needed is computed
from them by `statistics`, so that no two places can disagree. Made by `repeats`, printed by `repeat_report`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from .repeat_verdict import Kind, Run
from .statistics import CONFIDENCE, USUAL_RATES, Comparison, clean_runs_needed, rate_interval, ruled_out
from .tunings import TuningAccount
from .verdict import FAILING, VERDICT_ORDER, Place, VerdictWord


class RunsNeeded(msgspec.Struct, frozen=True, kw_only=True):
    """How many clean runs rule out a failure rate, one-sided."""

    rate: float
    runs: int


class RepeatResult(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel on one case, repeated."""

    kernel: str
    case: str
    layer: int | None
    configuration: dict[str, Any]
    """Pins and tuning, where the caller gave any."""
    verdict: VerdictWord
    reason: str
    place: Place | None
    tier: int | None
    rule: str | None
    kinds: tuple[Kind, ...]
    """In the order in which they were seen; a run's `kind` is a place in it."""
    all_runs: tuple[Run, ...]
    rule_out: float = USUAL_RATES[0]
    """The rate that clean runs are to exclude."""
    confidence: float = CONFIDENCE
    launched: tuple[dict[str, str], ...] = ()
    """Distinct sets of launched configurations, in the order in which they were seen."""

    @property
    def runs(self) -> int:
        return len(self.all_runs)

    @property
    def failures(self) -> int:
        return sum(kind.runs for kind in self.kinds if kind.failed)

    @property
    def rate(self) -> float | None:
        return self.failures / self.runs if self.runs else None

    @property
    def interval(self) -> tuple[float, float]:
        """Two-sided Clopper-Pearson."""
        return rate_interval(self.failures, self.runs, self.confidence)

    @property
    def ruled_out(self) -> float | None:
        """Where no run failed: rates above this are ruled out, one-sided."""
        return None if self.failures else ruled_out(self.runs, self.confidence)

    @property
    def distinct_outputs(self) -> int:
        return sum(kind.answered for kind in self.kinds)

    @property
    def failing(self) -> tuple[Kind, ...]:
        return tuple(kind for kind in self.kinds if kind.failed)

    @property
    def runs_needed(self) -> tuple[RunsNeeded, ...]:
        """Clean runs, from nothing, that rule out the usual rates."""
        return tuple(RunsNeeded(rate=r, runs=clean_runs_needed(r, self.confidence)) for r in USUAL_RATES)

    @property
    def still_needed(self) -> RunsNeeded:
        """Clean runs still missing to rule out `rule_out`; after a failure, those that a mended kernel needs
        to rule out the rate that was seen."""
        if self.failures:
            rate = self.failures / self.runs
            return RunsNeeded(rate=rate, runs=1 if rate >= 1 else clean_runs_needed(rate, self.confidence))
        needed = clean_runs_needed(self.rule_out, self.confidence)
        return RunsNeeded(rate=self.rule_out, runs=max(0, needed - self.runs))

    def counted(self, wanted: Callable[[Run], bool]) -> tuple[int, int]:
        """(failures, runs) among some of the runs."""
        chosen = [run for run in self.all_runs if wanted(run)]
        return sum(self.kinds[run.kind].failed for run in chosen), len(chosen)


class RepeatReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the repeats found out."""

    results: tuple[RepeatResult, ...]
    comparisons: tuple[tuple[str, str, Comparison], ...] = ()
    """Fisher's exact test of two series on the same case: what A is, what B is."""
    tuning: tuple[TuningAccount, ...] = ()
    """The tuners that each kernel passed, and what they drew in fresh tunings."""
    strict: bool = False
    seconds: float = 0.0
    command: str = ""

    @property
    def worst(self) -> RepeatResult:
        """The result that the document's own numbers are of: the worst verdict, then the highest rate."""
        return min(
            self.results,
            key=lambda r: (VERDICT_ORDER.index(r.verdict), -(r.rate or 0.0), -r.distinct_outputs),
        )

    @property
    def verdict(self) -> VerdictWord:
        return self.worst.verdict

    def __getattr__(self, name: str) -> Any:
        """Counts and rates are the worst result's (there is one, as a rule)."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.worst, name)

    @property
    def exit_status(self) -> int:
        """0, 1 or 3 of the design."""
        words = {r.verdict for r in self.results}
        if words == {"skipped"}:
            return 3
        return 1 if words & FAILING else int(self.strict and "suspect" in words)


def series_name(result: RepeatResult) -> str:
    """The kernel, and its pins where it has any."""
    pins = result.configuration.get("pins") or {}
    words = [f"{kernel}:{'+'.join(f'{k}={v}' for k, v in pin.items())}" for kernel, pin in pins.items()]
    return " ".join([result.kernel, *words])
