"""One kernel on one case: run it, run what its relations need, rule on it.

The idea: two batches of calls. The first is the case itself (its time decides how many relations can be
afforded); the second is everything else, so that a worker is entered twice at most. A kernel that does not
answer is ruled on here; one that does is handed to `judge`.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from ..kernels.contract import Promise
from ..kernels.interface import KernelCall, KernelInfo, RunResult
from .checks import companion, shape, slots
from .inputs import Inputs, call_of
from .judge import judge
from .relations import run_to_run
from .relations.compare_runs import compare_runs
from .relations.expectation import Expectation
from .relations.plan import RELATIONS, Choice, choose, plan_relations
from .soundness import Soundness
from .trial import Trial
from .verdict import DiffResult, Outcome, Ruling, VerdictWord
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
    atol: float | None = None
    rtol: float | None = None


def diff_one(runner: Runner, witness: Witness, soundness: Soundness, settings: Settings) -> DiffResult:
    """Run a kernel on a case and rule on its answer."""
    info = runner.info
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
        if "pool" in call.tensors:
            further.append(slots.check(call.tensors, first.outputs))
        further += _further(runner, trial, settings, first.seconds)
    ruling = judge(trial, soundness, further, tolerance=tolerance_of(settings))
    return _result(info, witness, ruling, first)


def answered(call: KernelCall, result: RunResult) -> RunResult:
    """A result with its final states under their name, also where the kernel left them in a pool."""
    state = slots.final_states(call.tensors, result.outputs)
    if state is None:
        return result
    return msgspec.structs.replace(result, outputs={**result.outputs, "final_state": state})


def tolerance_of(settings: Settings) -> tuple[float, float] | None:
    """(atol, rtol) where the caller gave either."""
    if settings.atol is None and settings.rtol is None:
        return None
    return settings.atol or 0.0, settings.rtol or 0.0


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
    """Everything that needs runs of its own, in one batch."""
    names = choose(settings.relations, trial.info, seconds)
    expected = plan_relations(names, trial.witness.inputs, trial.info, seed=settings.seed)
    # The companion is a further call of full size: a kernel that is spared repeats is spared it too.
    spare = run_to_run.NAME not in names
    twin = None if spare else companion.plan(trial.witness, trial.info, seed=settings.seed)
    calls = [call_for(trial.witness, e) for e in expected]
    if twin is not None:
        calls.append(call_of(twin))
    if not calls:
        return []
    results = [answered(call, result) for call, result in zip(calls, runner.run(calls), strict=True)]
    spared = [name for name in RELATIONS if name not in names] if settings.relations == "auto" else []
    outcomes = [_left_out(name, seconds) for name in spared]
    if twin is not None:
        outcomes.append(companion.check(twin, trial.info, results[-1], device=trial.witness.device))
    return outcomes + _relations(trial, expected, results[: len(expected)])


def call_for(witness: Witness, expected: Expectation) -> KernelCall:
    """The call of a changed input, in the form that the case itself is called in.

    A kernel that addresses a pool gets the pool with its sequences' slots changed, as long as the same
    sequences are in the call; else the states are handed over gathered.
    """
    first = call_of(witness.case)
    x: Inputs = expected.inputs
    if x is witness.inputs:
        return first
    tensors = {"q": x.q, "k": x.k, "v": x.v, "g": x.g, "beta": x.beta, "cu_seqlens": x.cu_seqlens}
    if expected.same_shape and x.initial_state is not None and "pool" in first.tensors:
        pool, slots = first.tensors["pool"].clone(), first.tensors["slot_indices"].long()
        owned = slots >= 0
        pool[slots[owned]] = x.initial_state.to(pool.device)[owned].to(pool.dtype)
        tensors |= {"pool": pool}
        tensors |= {n: first.tensors[n] for n in ("slot_indices", "has_initial_state") if n in first.tensors}
    elif x.initial_state is not None:
        tensors["initial_state"] = x.initial_state
        if expected.same_shape and "has_initial_state" in first.tensors:
            tensors["has_initial_state"] = first.tensors["has_initial_state"]
    return msgspec.structs.replace(first, tensors={n: t.cpu() for n, t in tensors.items()})


def _relations(trial: Trial, expected: list[Expectation], results: list[RunResult]) -> list[Outcome]:
    """Judge each relation, run-to-run first: where that fails, the others prove little."""
    outcomes: list[Outcome] = []
    steady = trial.info.contract.relation(run_to_run.NAME) != "not promised"
    for expectation, result in zip(expected, results, strict=True):
        promise = promise_of(trial.info, expectation)
        if result.status != "ok" or "output" not in result.outputs:
            outcomes.append(_not_run(expectation, result))
            continue
        if shape.check(expectation.inputs, result.outputs).status == "fires":
            outcomes.append(_not_run(expectation, result))
            continue
        outcome = compare_runs(
            trial,
            expectation,
            result.outputs["output"],
            result.outputs.get("final_state"),
            promise=promise,
            steady=steady,
        )
        if expectation.relation == "run-to-run" and outcome.place is not None:
            steady = False
        outcomes.append(outcome)
    return outcomes


def promise_of(info: KernelInfo, expectation: Expectation) -> Promise:
    """How far a relation binds. In a call of another shape a kernel may take another path (another block
    size, another autotune pick), so there it binds bit for bit only if batch invariance is promised too."""
    promise = info.contract.relation(expectation.relation)
    if not expectation.same_shape and info.contract.relation("batch-invariance") != "promised":
        return "observed"
    return promise


def _left_out(name: str, seconds: float | None) -> Outcome:
    """A relation that `auto` spares a slow kernel."""
    took = "" if seconds is None else f" ({seconds:.1f} s per call)"
    reason = f"not asked: the kernel is slow here{took}; add --relations all"
    return Outcome(check=name, tier=4, status="not-applicable", reason=reason)


def _not_run(expectation: Expectation, result: RunResult) -> Outcome:
    """A changed call that gave no answer: a crash is worth a suspicion, a refusal is not."""
    status: Any = "suspect" if result.status in ("crash", "timeout") else "not-applicable"
    what = result.message or "another shape came back"
    reason = f"{expectation.relation}: the kernel answered the case but not with {expectation.what}: {what}"
    return Outcome(check=expectation.relation, tier=4, status=status, reason=reason)
