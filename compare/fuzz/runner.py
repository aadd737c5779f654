"""The runner: flights of every kernel in the air, verdicts on what lands, one loop.

The idea: each kernel has a worker process and a thread that talks to it; this loop makes the next cases and
judges the last ones meanwhile. What a kernel does to its process costs its own case. Everything that is found
out is in the store before the next case of that kernel starts.

Leaves to others: what a case is and what it comes to (`subject`), confirming (`findings`), the clock, other
runners and the screen (`fuzz`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from ...capture.errors import GdncheckError
from ...kernels.pool import KernelHandle, WorkerPool
from ..store import RunStore
from ..verdict import FAILING
from .findings import Findings
from .flight import Job, Landed, fly
from .journal import Journal, Row
from .lanes import Numbers
from .plan import Plan
from .subject import Subject, Verdict

# Seconds that the kernel's part of a flight is to last; longer ones lose more to a kill.
FLIGHT_SECONDS = 1.0
GROWTH = 8  # a flight has so many times the last one's cases at most
# A call may take so many times the slowest one so far, and never less (seconds).
PATIENCE, LEAST_LIMIT = 30.0, 5.0
LOST = "cannot be loaded"

Tell = Callable[[str, dict[str, Any]], None]


class Flying:
    """One kernel in this runner."""

    def __init__(
        self, number: int, subject: Subject, handle: KernelHandle, numbers: Numbers, plan: Plan
    ) -> None:
        self.number, self.subject, self.handle, self.numbers, self.plan = (
            number,
            subject,
            handle,
            numbers,
            plan,
        )
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"kernel-{number}")
        self.in_air: dict[Future[Landed], list[Job]] = {}
        self.lost = ""
        """Why no more cases are run, where the kernel cannot be loaded any more."""
        self._size = 1
        self._slowest = 0.0
        self._compiled: set[int] = set()

    @property
    def size(self) -> int:
        """Cases of the next flight. One whose case takes long flies alone, judged before the next starts."""
        return self._size

    @property
    def may_take_off(self) -> bool:
        most = 1 if self.size == 1 else 2
        return not self.lost and len(self.in_air) < most

    def limit(self, jobs: Iterable[Job]) -> float:
        """Seconds for each call: all that was asked for where something may be compiled, else less."""
        on_gpu = self.subject.device != "cpu"
        known = all(job.recipe.shape in self._compiled for job in jobs) if on_gpu else self._slowest > 0
        if not known:
            return self.plan.time_limit
        return min(self.plan.time_limit, max(LEAST_LIMIT, PATIENCE * self._slowest))

    def take_off(self, jobs: list[Job]) -> Future[Landed]:
        future = self.thread.submit(fly, self.handle, jobs, self.subject.info, self.limit(jobs))
        self.in_air[future] = jobs
        return future

    def learn(self, landed: Landed) -> None:
        """Times, for the next flight's size and limit."""
        each = landed.wall / max(1, len(landed.jobs))
        wanted = int(FLIGHT_SECONDS / max(each, 1e-9))
        self._size = max(1, min(self.plan.batch, wanted, GROWTH * len(landed.jobs)))
        for job, ran in zip(landed.jobs, landed.first, strict=True):
            if ran.status == "ok":
                if job.recipe.shape in self._compiled or self.subject.device == "cpu":
                    self._slowest = max(self._slowest, ran.seconds)
                self._compiled.add(job.recipe.shape)


class Clock:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    @contextmanager
    def on(self, what: str) -> Any:
        started = time.perf_counter()
        try:
            yield
        finally:
            name = f"seconds.{what}"
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - started

    def taken(self) -> dict[str, float]:
        """What was spent since the last time, and start anew."""
        found = dict(self.spent)
        self.spent.clear()
        return found


class Runner:
    """Runs flights until the time or the numbers are used up."""

    def __init__(
        self,
        store: RunStore,
        workers: WorkerPool,
        kernels: list[Flying],
        plan: Plan,
        findings: Findings,
        tell: Tell,
    ) -> None:
        self.store, self.workers, self.kernels, self.plan = store, workers, kernels, plan
        self.journal = Journal(store)
        self.findings, self.tell, self.clock = findings, tell, Clock()

    def run(self, deadline: float) -> None:
        """Run until the deadline (monotonic seconds). Ctrl-C passes through, the store left as it should
        be."""
        try:
            for flying in self.kernels:
                for number in flying.numbers.interrupted:
                    self.tell("interrupted", {"kernel": flying.subject.info.name, "number": number})
            self.findings.pending(self.kernels, deadline)
            while True:
                if time.monotonic() < deadline:
                    for flying in self.kernels:
                        self._fill(flying)
                if not self._in_air():
                    break
                # The wait is bounded so that Ctrl-C is noticed and the screen moves.
                done, _ = wait(self._in_air(), timeout=0.5, return_when=FIRST_COMPLETED)
                for flying in self.kernels:
                    for future in [f for f in flying.in_air if f in done]:
                        self._land(flying, future)
                self.findings.pending(self.kernels, deadline)
                self.tell("tick", {})
        finally:
            for flying in self.kernels:
                flying.thread.shutdown(wait=False, cancel_futures=True)
                self.journal.forget(
                    flying.number, [j.number for jobs in flying.in_air.values() for j in jobs]
                )
            self._count({})

    def _in_air(self) -> list[Future[Landed]]:
        return [future for flying in self.kernels for future in flying.in_air]

    def _fill(self, flying: Flying) -> None:
        """Send off what may take off."""
        while flying.may_take_off:
            numbers = flying.numbers.take(flying.size)
            if not numbers:
                return
            with self.clock.on("making"):
                jobs = [flying.subject.job(n, flying.numbers.lane(n).snapshot(n)) for n in numbers]
            with self.clock.on("bookkeeping"):
                self.journal.start(flying.number, jobs)
            flying.take_off(jobs)

    def _land(self, flying: Flying, future: Future[Landed]) -> None:
        jobs = flying.in_air[future]
        landed = future.result()
        flying.learn(landed)
        with self.clock.on("reference"):
            verdicts = flying.subject.verdicts(landed)
        with self.clock.on("bookkeeping"):
            del flying.in_air[future]
            if self._is_lost(flying, verdicts, jobs):
                return
            with self.store.transaction():
                counts = Counter[str]()
                for verdict in verdicts:
                    self._note(flying, verdict, counts)
                seconds = {
                    "seconds.kernel": landed.kernel,
                    "seconds.transfer": max(0.0, landed.wall - landed.kernel),
                }
                self._count({**counts, **seconds})

    def _note(self, flying: Flying, verdict: Verdict, counts: Counter[str]) -> None:
        """One case's verdict into the store, and into the lane's feedback."""
        name, job = flying.subject.info.name, verdict.job
        digest = None
        if verdict.verdict in FAILING and verdict.verdict != "out-of-contract":
            digest = self.findings.seen(flying, verdict)
            if verdict.verdict in ("error", "timeout"):
                counts["survived"] += 1
        self.journal.finish(
            flying.number, job.number, verdict.verdict, seconds=verdict.seconds,
            feedback=verdict.feedback, signature=digest,
        )  # fmt: skip
        flying.numbers.finish(
            Row(
                number=job.number, verdict=verdict.verdict, recipe=job.recipe,
                feedback=verdict.feedback, signature=digest,
            )
        )  # fmt: skip
        counts["cases"] += 1
        counts[f"kernel.{name}"] += 1
        counts[f"verdict.{verdict.verdict}"] += 1
        counts[f"generator.{job.recipe.made_by}"] += 1
        for axis in verdict.exercised:
            counts[f"axis.{axis}"] += 1
        for family in job.recipe.families:
            counts[f"family.{family}"] += 1
        self.tell("case", {"kernel": name, "number": job.number, "verdict": verdict.verdict})

    def _is_lost(self, flying: Flying, verdicts: list[Verdict], jobs: list[Job]) -> bool:
        """A kernel that cannot be loaded any more (a GPU that is gone) takes no further cases."""
        gone = [v for v in verdicts if v.attempt is not None and LOST in v.attempt.reason]
        if not gone:
            return False
        try:
            flying.handle.close()
            flying.handle.run([])
            flying.handle.start()
            flying.handle.close()
        except GdncheckError as error:
            flying.lost = str(error)
            self.journal.forget(flying.number, [job.number for job in jobs])
            self.tell("lost", {"kernel": flying.subject.info.name, "reason": str(error)})
            return True
        return False

    def _count(self, amounts: Mapping[str, float]) -> None:
        self.journal.count({**self.clock.taken(), **amounts})
