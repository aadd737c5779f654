"""One kernel on one case: run it, run what its checks need, rule on it.

The idea: the case itself comes first, and its time decides what else can be afforded: the exact companion,
the relations (`relations.run`), the stages. A kernel that does not answer is ruled on here; one that does is
handed to `judge`.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from ..capture.errors import BadInput
from ..kernels.interface import KernelCall, KernelInfo, RunResult
from .checks import companion, inputs_kept, shape, slots
from .inputs import call_of
from .judge import judge
from .relations import run_to_run
from .relations.plan import Choice, choose
from .relations.run import answered, run_relations
from .soundness import Soundness
from .stages import StageReport, compare_stages
from .tolerances import Tolerance
from .trial import Trial
from .verdict import DiffResult, Outcome, Ruling, VerdictWord
from .verify.session import diff_step
from .witness import Witness

STATUS_VERDICT: dict[str, VerdictWord] = {
    "error": "error",
    "crash": "error",
    "timeout": "timeout",
    "refused": "skipped",
}


class Runner(Protocol):
    """An open kernel: `kernels.pool.KernelHandle`, or a double in a test."""

    @property
    def info(self) -> KernelInfo: ...

    def run(self, calls: list[KernelCall]) -> list[RunResult]: ...


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a diff was asked for, as far as judging goes."""

    seed: int = 0
    relations: Choice = "auto"
    tolerances: dict[str, Tolerance] = {}
    """By tensor; empty: the rules decide."""
    stages: bool = False
    """Compare the kernel's stages too."""


def diff_one(
    runner: Runner,
    witness: Witness,
    soundness: Soundness,
    settings: Settings,
    *,
    trials: list[Trial] | None = None,
) -> DiffResult:
    """Run a kernel on a case and rule on its answer. trials: takes the answer, for pairs of kernels."""
    info = runner.info
    if witness.case.op == "verify":
        if settings.tolerances or settings.stages:
            raise BadInput("a verify step is judged by rules alone; leave --atol, --rtol and --stages out")
        device, seed = str(witness.device), settings.seed
        return diff_step(runner, witness.case, soundness, device=device, seed=seed)
    call = call_of(witness.case)
    first = answered(call, runner.run([call])[0])
    if first.status != "ok":
        return _result(info, witness, unanswered(first), first)
    fault = shape.check(witness.inputs, first.outputs)
    if fault.status == "fires":
        ruling = Ruling(
            verdict="fail",
            tier=fault.tier,
            rule=fault.check,
            reason=fault.reason,
            worst_tile=fault.place,
            error={"output": None, "state": None},
            outcomes=(fault,),
        )
        return _result(info, witness, ruling, first)
    trial = Trial(witness, info, first.outputs["output"], first.outputs["final_state"])
    further: list[Outcome] = []
    if soundness.sound:
        further.append(inputs_kept.check(first.evidence, info.contract, given=len(call.tensors)))
        if "pool" in call.tensors:
            further.append(slots.check(call.tensors, first.outputs))
        further += _further(runner, trial, settings, first.seconds)
    ruling = judge(trial, soundness, further, tolerance=settings.tolerances)
    report = StageReport()
    if settings.stages:
        report = (
            compare_stages(runner, trial) if soundness.sound else StageReport(note="the input is not sound")
        )
        ruling = _with_stages(ruling, report)
    if trials is not None:
        trials.append(trial)
    return msgspec.structs.replace(
        _result(info, witness, ruling, first), stages=report.findings, stages_note=report.note
    )


def unanswered(result: RunResult) -> Ruling:
    """The ruling on a kernel that gave no result."""
    verdict = STATUS_VERDICT[result.status]
    message = result.message or f"the kernel ended with status {result.status}"
    return Ruling(verdict=verdict, reason=message, error={"output": None, "state": None})


def _result(info: KernelInfo, witness: Witness, ruling: Ruling, first: RunResult) -> DiffResult:
    case = witness.case
    return DiffResult(
        kernel=info.name,
        case=str(case.path) if case.path is not None else case.label,
        layer=case.origin.layer,
        ruling=ruling,
        seconds=first.seconds,
        evidence=first.evidence,
    )


def _further(runner: Runner, trial: Trial, settings: Settings, seconds: float | None) -> list[Outcome]:
    """Everything that needs runs of its own: the relations, run-to-run first, then the exact companions."""
    outcomes = run_relations(runner, trial, settings.relations, seed=settings.seed, seconds=seconds)
    # A companion is a further call of full size: a kernel that is spared repeats is spared it too.
    if run_to_run.NAME not in choose(settings.relations, trial.info, seconds):
        return outcomes
    for name, twin in companion.plans(trial.witness, seed=settings.seed).items():
        call = call_of(twin)
        result = answered(call, runner.run([call])[0])
        outcomes.append(companion.check(twin, trial.info, result, device=trial.witness.device, name=name))
    return outcomes


def _with_stages(ruling: Ruling, report: StageReport) -> Ruling:
    """The stage goes into the reason; a stage that departs behind a right result is a suspect."""
    if report.first is None:
        return ruling
    reason = f"{ruling.reason}; {report.reason}"
    if ruling.verdict != "pass":
        return msgspec.structs.replace(ruling, reason=reason)
    return msgspec.structs.replace(
        ruling, verdict="suspect", tier=3, rule="stages", reason=report.reason, worst_tile=report.first.place
    )
