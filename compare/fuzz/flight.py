"""A flight: some cases of one kernel, run side by side in its worker, a batch of calls at a time.

The idea: a prefill that is cut needs its first call's state before its second, but the first calls of thirty
cases need nothing of one another. So each case is a conversation, and every round sends one call of each. A
call that loses the worker costs its own case; the others go on in the next one (`kernels.pool`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from ...kernels.interface import KernelCall, KernelInfo, RunResult
from ..axes.axis import Ran, Setup
from ..sweep.engine import Conversation, conversation
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
    first = _side_by_side(runner, [job.setup for job in jobs], info, time_limit)
    again = [i for i, job in enumerate(jobs) if job.repeat and first[i].status == "ok"]
    second = _side_by_side(runner, [jobs[i].setup for i in again], info, time_limit) if again else []
    return Landed(
        jobs=jobs,
        first=first,
        second={jobs[i].number: ran for i, ran in zip(again, second, strict=True)},
        wall=time.perf_counter() - started,
        kernel=sum(ran.seconds for ran in (*first, *second)),
    )


def _side_by_side(runner: Runner, setups: Sequence[Setup], info: KernelInfo, time_limit: float) -> list[Ran]:
    """Every setup's answer, in order."""
    answers: dict[int, Ran] = {}
    talking: dict[int, tuple[Conversation, KernelCall]] = {}
    for i, setup in enumerate(setups):
        talk = conversation(setup, info)
        _say(talk, None, i, talking, answers)
    while talking:
        numbers = list(talking)
        results = runner.run([talking[i][1] for i in numbers], time_limit=time_limit)
        for i, result in zip(numbers, results, strict=True):
            talk, _ = talking.pop(i)
            _say(talk, result, i, talking, answers)
    return [answers[i] for i in range(len(setups))]


def _say(
    talk: Conversation,
    result: RunResult | None,
    number: int,
    talking: dict[int, tuple[Conversation, KernelCall]],
    answers: dict[int, Ran],
) -> None:
    """Hand a result to a conversation, and note the call that it asks for next, or its answer."""
    try:
        call = next(talk) if result is None else talk.send(result)
    except StopIteration as end:
        answers[number] = end.value
    else:
        talking[number] = (talk, call)
