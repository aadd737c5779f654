"""repeat: the same call many times; how often it fails, how many answers it has, and how sure that is.

The idea: a failure that comes and goes is a rate, not a yes or no. Runs are told apart by their bits, each
different answer is judged once, and the counts go to exact intervals (`statistics`). A kernel whose answers
differ although none is wrong still has `distinct_outputs` above one: a race shows so long before a NaN.

Leaves to others: what a failure is (`judge`), confidence (`statistics`), relations between calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..capture.case import Case
from ..capture.errors import BadInput
from ..kernels.interface import RunResult
from ..kernels.pool import WorkerPool
from .checks import shape
from .inputs import call_of
from .judge import judge
from .relations.run import answered
from .session import Runner, unanswered
from .soundness import soundness_of
from .statistics import CONFIDENCE, USUAL_RATES, clean_runs_needed, rate_interval, ruled_out
from .threads import threads_for
from .trial import Trial
from .verdict import FAILING, Ruling
from .witness import Witness

# Calls sent to a worker at a time: what comes back of one batch is held at once.
BATCH = 16


class RunsNeeded(msgspec.Struct, frozen=True, kw_only=True):
    """How many clean runs rule out a failure rate."""

    rate: float
    runs: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that gave the same bits, or ended in the same way without any."""

    ruling: Ruling
    runs: int
    first: int
    """0-based number of the first of them."""


class RepeatReport(msgspec.Struct, frozen=True, kw_only=True):
    """What so many runs of one call showed."""

    kernel: str
    case: str
    runs: int
    failures: int
    """Runs whose verdict is fail, error, timeout or out-of-contract."""
    interval: tuple[float, float]
    """Two-sided Clopper-Pearson interval of the failure rate."""
    answers: tuple[Answer, ...]
    """Most frequent first."""
    confidence: float = CONFIDENCE
    runs_needed: tuple[RunsNeeded, ...] = ()
    """Clean runs that rule out the usual rates, one-sided."""
    ruled_out: float | None = None
    """Where no run failed: rates above this are ruled out, one-sided."""

    @property
    def rate(self) -> float:
        return self.failures / self.runs

    @property
    def distinct_outputs(self) -> int:
        """Different answers among the runs that gave one."""
        return sum(a.ruling.tier is not None for a in self.answers)

    @property
    def failing(self) -> tuple[Answer, ...]:
        return tuple(a for a in self.answers if a.ruling.verdict in FAILING)


def repeat(
    case: Case,
    kernel: str | Runner,
    *,
    runs: int = 100,
    device: str = "auto",
    time_limit: float = 300.0,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> RepeatReport:
    """Run one call so many times in one process and count.

    kernel: a name, or an open kernel (its device and time limit are then its own). seed: of the yardstick.
    Raises BadInput for a wrong name or number of runs, CannotRun where the kernel cannot be loaded.
    """
    if runs < 1:
        raise BadInput(f"runs is {runs}; give 1 or more")
    if not isinstance(kernel, str):
        return _repeated(case, kernel, runs, seed, confidence)
    with WorkerPool(device=device, time_limit=time_limit) as pool:
        return _repeated(case, pool.open(kernel), runs, seed, confidence)


def _repeated(case: Case, runner: Runner, runs: int, seed: int, confidence: float) -> RepeatReport:
    with threads_for(case["v"].numel()):
        witness = Witness(case, seed=seed)
        soundness = soundness_of(witness)
        found: dict[str, list[Any]] = {}
        for number, result in enumerate(_results(runner, case, runs)):
            key = _key(result)
            if key not in found:
                found[key] = [_rule(runner, witness, soundness, result), 0, number]
            found[key][1] += 1
    answers = tuple(
        Answer(ruling=ruling, runs=count, first=first)
        for ruling, count, first in sorted(found.values(), key=lambda f: (-f[1], f[2]))
    )
    failures = sum(a.runs for a in answers if a.ruling.verdict in FAILING)
    return RepeatReport(
        kernel=runner.info.name,
        case=str(case.path) if case.path is not None else case.label,
        runs=runs,
        failures=failures,
        interval=rate_interval(failures, runs, confidence),
        answers=answers,
        confidence=confidence,
        runs_needed=tuple(RunsNeeded(rate=r, runs=clean_runs_needed(r, confidence)) for r in USUAL_RATES),
        ruled_out=None if failures else ruled_out(runs, confidence),
    )


def _results(runner: Runner, case: Case, runs: int) -> Iterator[RunResult]:
    call = call_of(case)
    for start in range(0, runs, BATCH):
        yield from (answered(call, r) for r in runner.run([call] * min(BATCH, runs - start)))


def _key(result: RunResult) -> str:
    """The same for results with the same bits, or of the same failure."""
    if result.status != "ok":
        return f"{result.status}: {result.message}"
    digest = hashlib.sha256()
    for name in sorted(result.outputs):
        tensor = result.outputs[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _rule(runner: Runner, witness: Witness, soundness: Any, result: RunResult) -> Ruling:
    """The verdict on one answer by itself, without further calls."""
    if result.status != "ok":
        return unanswered(result)
    fault = shape.check(witness.inputs, result.outputs)
    if fault.status == "fires":
        return Ruling(
            verdict="fail", tier=fault.tier, rule=fault.check, reason=fault.reason, outcomes=(fault,)
        )
    trial = Trial(witness, runner.info, result.outputs["output"], result.outputs["final_state"])
    return judge(trial, soundness, [])
