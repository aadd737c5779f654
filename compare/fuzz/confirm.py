"""Confirm a new failure: again in a fresh process, how often, and which of its deviations matter.

The idea: a failure that is gone in a process of its own was made by what ran before it, or comes and goes;
both are said, with the rate and its interval. Deviations are taken away while it still fails (`ddmin`), so
that the same fault under other company has one name.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from ...capture.case import Case
from ...kernels.interface import KernelCall, KernelInfo, RunResult
from ...kernels.pool import KernelHandle, WorkerPool
from ..axes.axis import Setup, Situation
from ..statistics import clean_runs_needed, rate_interval
from ..store import Signature
from ..sweep.attempt import Attempt, Kind
from ..sweep.baseline import baseline_for
from ..sweep.configuration import configuration_of, setup_of
from ..sweep.ddmin import ddmin
from ..sweep.engine import run_setup
from ..sweep.judging import Judge
from ..sweep.kernel_runs import Process
from .naming import attempt_of, signature_of, unsteady

# Runs that a rate is measured on, and before a failure that does not come again is given up.
RATE_RUNS, GIVEN_UP_AFTER = 10, 60
# Seconds per run above which three runs must do.
SLOW, FEW_RUNS = 1.0, 3
MOST_RUNS_PER_QUESTION = 60


class Confirmed(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What confirming a failure came to."""

    signature: Signature
    """Under which it is kept; the raw one where it did not come again."""
    failures: int
    runs: int
    deviations: dict[str, str]
    attempt: Attempt | None
    """A failing run under these deviations; None where none failed."""
    seconds: float

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the rate."""
        return rate_interval(self.failures, self.runs)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that a call may take."""

    first: float
    """Of a process: it may compile."""
    later: float


class _InTime(Process):
    """A worker whose calls have limits of their own."""

    def __init__(
        self, handle: KernelHandle, info: KernelInfo, warm_setup: Setup | None, limits: Limits
    ) -> None:
        super().__init__(handle, info, warm_setup)
        self.limits, self._processes = limits, 0

    def run(self, calls: list[KernelCall]) -> list[RunResult]:
        self.warm()
        fresh = self.handle.processes_started != self._processes
        limit = self.limits.first if fresh else self.limits.later
        results = self.handle.run(calls, time_limit=limit)
        # Read after the calls: a process that was lost in them makes the next one's first call another first.
        lost = any(result.status in ("crash", "timeout") for result in results)
        self._processes = -1 if lost else self.handle.processes_started
        if lost and self.warm_setup is not None:
            self._warm = False
        return results


class Confirmation:
    """One failure in a process of its own."""

    def __init__(
        self,
        workers: WorkerPool,
        handle: KernelHandle,
        info: KernelInfo,
        case: Case,
        given: Mapping[str, str],
        *,
        seed: int,
        device: str,
        limits: Limits,
        budget: float,
    ) -> None:
        """handle: of the shared process, whose kernel is loaded anew. budget: seconds."""
        self.workers, self.spec, self.info = workers, handle.spec, info
        self.situation = Situation(case=case, info=info, seed=seed)
        self.baseline, _ = baseline_for(dict(given), self.situation)
        self.judge = Judge(device, seed)
        self.limits = limits
        self._own_device = handle.device
        self._stop = time.monotonic() + budget
        self.failures = self.runs = 0

    def run(self, raw: Signature, kind: Kind, deviations: Mapping[str, str]) -> Confirmed:
        """Confirm, measure and reduce."""
        started = time.monotonic()
        handle = self.workers.begin(self.spec, device=self._own_device)
        try:
            # A failure without an answer needs no call before it, which would only fail too.
            warm = None if kind == "error" else self._setup({})
            process = _InTime(handle, self.info, warm, self.limits)
            attempt = self._measure(process, kind, deviations)
            kept = dict(deviations)
            if attempt is not None and kept:
                kept, attempt = self._reduced(process, kind, kept, attempt)
        finally:
            handle.close()
        return Confirmed(
            signature=raw if attempt is None else self._signature(attempt),
            failures=self.failures,
            runs=self.runs,
            deviations=kept,
            attempt=attempt,
            seconds=time.monotonic() - started,
        )

    def _signature(self, attempt: Attempt) -> Signature:
        chunk = self._setup(attempt.deviations).chunk_size
        found = signature_of(attempt, self.info.version, chunk)
        return unsteady(found) if self.failures < self.runs else found

    def _setup(self, deviations: Mapping[str, str]) -> Setup:
        return setup_of(configuration_of(deviations, self.baseline), self.situation)

    def _measure(self, process: Process, kind: Kind, deviations: Mapping[str, str]) -> Attempt | None:
        """Run until the rate is known; the first failing run."""
        failing: Attempt | None = None
        spent = 0.0
        while not self._late:
            began = time.monotonic()
            attempt = self._once(process, deviations)
            spent += time.monotonic() - began
            self.runs += 1
            if attempt.kind == kind or (attempt.kind is not None and kind == "wrong"):
                self.failures += 1
                failing = failing or attempt
            wanted = FEW_RUNS if self.failures == self.runs and spent > SLOW * self.runs else RATE_RUNS
            if self.failures and self.runs >= wanted:
                break
            if self.runs >= GIVEN_UP_AFTER:
                break
        return failing

    def _once(self, process: Process, deviations: Mapping[str, str]) -> Attempt:
        config = configuration_of(deviations, self.baseline)
        setup = self._setup(deviations)
        ran = run_setup(process, setup, self.info)
        judgement = self.judge.judge(setup, ran, self.info)
        return attempt_of(self.info, self.situation.case.label, config, deviations, setup, ran, judgement)

    def _reduced(
        self, process: Process, kind: Kind, deviations: dict[str, str], attempt: Attempt
    ) -> tuple[dict[str, str], Attempt]:
        """The fewest deviations that still fail in the same kind, and a failing run under them."""
        needed = self._runs_per_question
        seen = {tuple(deviations.items()): attempt}

        def fails(part: list[tuple[str, str]]) -> bool:
            for _ in range(needed):
                if self._late:
                    return False
                again = self._once(process, dict(part))
                if again.kind == kind:
                    seen[tuple(part)] = again
                    return True
            return False

        kept = ddmin(list(deviations.items()), fails)
        found = seen.get(tuple(kept))
        return (dict(kept), found) if found is not None else (deviations, attempt)

    @property
    def _runs_per_question(self) -> int:
        """Runs after which a failure of the measured rate would have shown."""
        if self.failures == self.runs:
            return 1
        rate = rate_interval(self.failures, self.runs)[0]
        return min(MOST_RUNS_PER_QUESTION, clean_runs_needed(max(rate, 0.01)))

    @property
    def _late(self) -> bool:
        return time.monotonic() > self._stop
