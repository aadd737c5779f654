"""A flight: some cases of one kernel, run in its worker, as many calls to a message as can be.

The idea: a case of one call needs nothing of another, so those go in one batch. A case of several calls (a
prefill that is cut, a history) has them one after another with nobody's in between, as it would when it is
run alone: what a kernel remembers from call to call must not depend on what a case flies beside. A call that
loses the worker costs its own case; the others go on in the next one (`kernels.pool`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from ...kernels.interface import KernelCall, KernelInfo, RunResult
from ..axes.axis import Ran, Setup
from ..sweep.engine import Conversation, conversation, run_setup
from .recipe import Recipe


class Runner(Protocol):
    """An open kernel: `kernels.pool.KernelHandle`, or a double."""

    def run(self, calls: list[KernelCall], *, time_limit: float | None = None) -> list[RunResult]: ...


class Job(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One case, ready to run."""

    number: int
    recipe: Recipe
    setup: Setup
    config: dict[str, str]
    """Every axis."""
    repeat: bool = False
    """Run it twice: the bits must be the same."""


class Landed(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a flight brought back."""

    jobs: Sequence[Job]
    first: list[Ran]
    second: dict[int, Ran]
    """Number -> the second run of those that were repeated."""
    wall: float
    """Seconds from start to end, transfer included."""
    kernel: float
    """Seconds of the kernel alone."""


def fly(runner: Runner, jobs: Sequence[Job], info: KernelInfo, time_limit: float) -> Landed:
    """Run the jobs. Raises nothing for what a kernel does."""
    started = time.perf_counter()
    first = _answers(runner, [job.setup for job in jobs], info, time_limit)
    again = [i for i, job in enumerate(jobs) if job.repeat and first[i].status == "ok"]
    second = _answers(runner, [jobs[i].setup for i in again], info, time_limit) if again else []
    return Landed(
        jobs=jobs,
        first=first,
        second={jobs[i].number: ran for i, ran in zip(again, second, strict=True)},
        wall=time.perf_counter() - started,
        kernel=sum(ran.seconds for ran in (*first, *second)),
    )


def _answers(runner: Runner, setups: Sequence[Setup], info: KernelInfo, time_limit: float) -> list[Ran]:
    """Every setup's answer, in order; those of one call first."""
    limited = _Limited(runner, time_limit)
    single = [i for i, setup in enumerate(setups) if not (setup.through_pool or setup.life != "prefill")]
    talks = [conversation(setups[i], info) for i in single]
    calls = [next(talk) for talk in talks]
    results = limited.run(calls) if calls else []
    answers = {i: _end(talk, result) for i, talk, result in zip(single, talks, results, strict=True)}
    for i, setup in enumerate(setups):
        if i not in answers:
            answers[i] = run_setup(limited, setup, info)
    return [answers[i] for i in range(len(setups))]


class _Limited:
    """A kernel whose calls have a time limit."""

    def __init__(self, runner: Runner, time_limit: float) -> None:
        self.runner, self.time_limit = runner, time_limit

    def run(self, calls: list[KernelCall]) -> list[RunResult]:
        return self.runner.run(calls, time_limit=self.time_limit)


def _end(talk: Conversation, result: RunResult) -> Ran:
    """What a conversation of one call comes to."""
    try:
        talk.send(result)
    except StopIteration as end:
        ran: Ran = end.value
        return ran
    raise AssertionError("a setup of one call made another")
