"""Run a kernel's relations: one after the other, so that only one changed call is held at a time.

The idea: a relation is planned, run and judged before the next one begins. That bounds memory, lets a slow
kernel stop when the time it may cost is used up, and lets run-to-run, which comes first, say whether the
others' lost bits mean anything. Every outcome counts what it exercised; nothing exercised is no result.

Leaves to others: what each relation asks (its own file), whether rows agree (`compare_runs`).
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import torch

from ...kernels.contract import Promise
from ...kernels.interface import KernelCall, KernelInfo, RunResult
from ..checks import shape, slots
from ..inputs import Inputs, call_of
from ..trial import Trial
from ..verdict import Outcome
from ..witness import Witness
from . import run_to_run, unowned
from .compare_runs import compare_runs, moved_rows
from .expectation import Expectation, Plan
from .plan import RELATIONS, Choice, choose, plan_relation

TIER = 4
# Seconds after which `auto` leaves out the relations that are still to come.
AUTO_SECONDS = 60.0


def run_relations(
    runner: Any, trial: Trial, choice: Choice, *, seed: int, seconds: float | None
) -> list[Outcome]:
    """Every chosen relation's outcome, and why the others were not asked for.

    runner: an open kernel (`session.Runner`); seconds: what its first call took.
    """
    if choice == "none":
        return []
    started = time.monotonic()
    names = choose(choice, trial.info, seconds)
    outcomes: list[Outcome] = []
    steady = trial.info.contract.relation(run_to_run.NAME) != "not promised"
    for name in RELATIONS:
        late = choice == "auto" and time.monotonic() - started > AUTO_SECONDS
        if name not in names or late:
            if choice == "auto":
                outcomes.append(
                    _not_applicable(name, f"not asked{_because(seconds, late)}; add --relations all")
                )
            continue
        found = run_relation(runner, trial, name, seed=seed, steady=steady)
        outcomes += found
        if name == run_to_run.NAME and any(o.place is not None for o in found):
            steady = False
    return outcomes


def _because(seconds: float | None, late: bool) -> str:
    if late:
        return f": the others took over {AUTO_SECONDS:g} s"
    return "" if seconds is None else f" (a call takes {seconds:.1f} s)"


def run_relation(runner: Any, trial: Trial, name: str, *, seed: int, steady: bool) -> list[Outcome]:
    """One relation's outcomes. steady: the kernel repeats bit for bit."""
    if trial.info.contract.relation(name) == "not promised" and name != unowned.NAME:
        return [_not_applicable(name, "not promised by the kernel's contract")]
    planned: Plan = plan_relation(name, trial, call_of(trial.witness.case), seed=seed)
    if isinstance(planned, str):
        return [_not_applicable(name, planned)]
    if not planned:
        return [_not_applicable(name, "nothing of this case can be changed so")]
    outcomes: list[Outcome] = []
    for expectation in planned:
        following: Expectation | None = expectation
        while following is not None:
            outcome, following = _one_call(runner, trial, following, steady=steady)
            outcomes.append(outcome)
    return outcomes


def _one_call(
    runner: Any, trial: Trial, expected: Expectation, *, steady: bool
) -> tuple[Outcome, Expectation | None]:
    """Run and judge one expectation; its continuation where it has one and the answer allows it."""
    answers = _answers(runner, trial, expected)
    if answers is None:
        return _not_applicable(expected.relation, "this runner has one process only"), None
    base, call, result = answers
    if result.status != "ok" or "output" not in result.outputs:
        return _not_run(expected, result), None
    result = _without_spare_rows(expected, result)
    if shape.check(expected.inputs, result.outputs).status == "fires":
        return _not_run(expected, result), None
    if expected.proof and not result.evidence.get(expected.proof):
        return _not_applicable(
            expected.relation, f"not exercised: no {expected.proof.replace('_', ' ')}"
        ), None
    if expected.exercised == 0:
        return _not_applicable(expected.relation, f"not exercised: {expected.what} stay as they are"), None
    outcome = expected.judge(base, result) if expected.judge is not None else None
    if outcome is None and "pool" in call.tensors:
        touched = slots.check(call.tensors, result.outputs)
        if touched.status == "fires":
            outcome = msgspec.structs.replace(touched, check=expected.relation)
    if outcome is None:
        outcome = compare_runs(
            base, expected, result.outputs["output"], result.outputs.get("final_state"),
            promise=promise_of(trial.info, expected), steady=steady,
        )  # fmt: skip
    counted = {"exercised": _exercised(base, expected, result), **outcome.numbers}
    outcome = msgspec.structs.replace(outcome, numbers=counted)
    return outcome, expected.then(result) if expected.then is not None else None


def _answers(runner: Any, trial: Trial, expected: Expectation) -> tuple[Trial, KernelCall, RunResult] | None:
    """What to compare with, the call and its answer; None where the runner has no processes to offer."""
    call = call_for(trial.witness, expected)
    if expected.process == "same":
        calls = [call_for(trial.witness, _as_is(expected, inputs)) for inputs in expected.before]
        return trial, call, answered(call, runner.run([*calls, call])[-1])
    if not hasattr(runner, "processes_started"):
        return None
    fresh = answered(call, runner.run([call], fresh_process=True)[0])
    if expected.process == "fresh" or fresh.status != "ok":
        return trial, call, fresh
    # That process has ended, so the next two calls open one of their own.
    first, second = (answered(call, result) for result in runner.run([call, call]))
    if first.status != "ok" or shape.check(expected.inputs, first.outputs).status == "fires":
        return trial, call, first
    own = Trial(trial.witness, trial.info, first.outputs["output"], first.outputs.get("final_state"))
    return own, call, second


def _as_is(expected: Expectation, inputs: Inputs) -> Expectation:
    same = len(inputs.cu_seqlens) == len(expected.inputs.cu_seqlens)
    return msgspec.structs.replace(expected, inputs=inputs, before=(), same_shape=same)


def call_for(witness: Witness, expected: Expectation) -> KernelCall:
    """The call of a changed input, in the form that the case itself is called in.

    A kernel that addresses a pool gets the pool with its sequences' slots changed, as long as the same
    sequences are in the call; else the states are handed over gathered.
    """
    first = call_of(witness.case)
    options = msgspec.structs.replace(first.options, **expected.options)
    x: Inputs = expected.inputs
    if x is witness.inputs and expected.tensors is None:
        return msgspec.structs.replace(first, options=options)
    if x is witness.inputs and "pool" not in (expected.tensors or {}):
        tensors = {**first.tensors, **(expected.tensors or {})}
        return msgspec.structs.replace(
            first, tensors={n: t.cpu() for n, t in tensors.items()}, options=options
        )
    tensors = {"q": x.q, "k": x.k, "v": x.v, "g": x.g, "beta": x.beta, "cu_seqlens": x.cu_seqlens}
    if "pool" in (expected.tensors or {}):
        tensors |= expected.tensors or {}
    elif expected.same_shape and x.initial_state is not None and "pool" in first.tensors:
        pool, at = first.tensors["pool"].clone(), first.tensors["slot_indices"].long()
        owned = at >= 0
        pool[at[owned]] = x.initial_state.to(pool.device)[owned].to(pool.dtype)
        tensors |= {"pool": pool}
        tensors |= {n: first.tensors[n] for n in ("slot_indices", "has_initial_state") if n in first.tensors}
    elif x.initial_state is not None:
        tensors["initial_state"] = x.initial_state
        if expected.same_shape and "has_initial_state" in first.tensors:
            tensors["has_initial_state"] = first.tensors["has_initial_state"]
    return msgspec.structs.replace(first, tensors={n: t.cpu() for n, t in tensors.items()}, options=options)


def answered(call: KernelCall, result: RunResult) -> RunResult:
    """A result with its final states under their name, also where the kernel left them in a pool."""
    state = slots.final_states(call.tensors, result.outputs)
    if state is None:
        return result
    return msgspec.structs.replace(result, outputs={**result.outputs, "final_state": state})


def promise_of(info: KernelInfo, expectation: Expectation) -> Promise:
    """How far a relation binds. In a call of another shape a kernel may take another path (another block
    size, another autotune pick), so there it binds bit for bit only if batch invariance is promised too."""
    promise = info.contract.relation(expectation.relation)
    if promise == "not promised":
        return "observed"
    if not expectation.same_shape and info.contract.relation("batch-invariance") != "promised":
        return "observed"
    return promise


def _without_spare_rows(expected: Expectation, result: RunResult) -> RunResult:
    """Rows of nobody are no part of the answer; what they hold is kept as evidence."""
    spare, output = expected.spare_rows, result.outputs["output"]
    n_tokens = expected.inputs.n_tokens
    if not spare or output.shape[0] != n_tokens + spare:
        return result
    rest = output[n_tokens:]
    holds = "zeros" if bool((rest == 0).all()) else "nan" if bool(torch.isnan(rest).all()) else "other values"
    return msgspec.structs.replace(
        result,
        outputs={**result.outputs, "output": output[:n_tokens]},
        evidence={**result.evidence, "unowned_rows": holds},
    )


def _exercised(base: Trial, expected: Expectation, result: RunResult) -> int:
    """Rows that moved where they may, what was put in, what the evidence counts, else rows compared."""
    if expected.changed_rows is not None and len(expected.changed_rows):
        return moved_rows(base, expected, result.outputs["output"])
    if expected.exercised is not None:
        return expected.exercised
    if expected.proof:
        return int(result.evidence[expected.proof])
    return len(expected.output_rows[0]) + len(expected.state_rows[0])


def _not_applicable(name: str, reason: str) -> Outcome:
    return Outcome(check=name, tier=TIER, status="not-applicable", reason=reason)


def _not_run(expected: Expectation, result: RunResult) -> Outcome:
    """A changed call that gave no answer: a crash is worth a suspicion, a refusal is not."""
    status: Any = "suspect" if result.status in ("crash", "timeout") else "not-applicable"
    what = result.message or "another shape came back"
    changed = f"{expected.what} {expected.verb}"
    reason = f"{expected.relation}: the kernel answered the case but not with {changed}: {what}"
    return Outcome(check=expected.relation, tier=TIER, status=status, reason=reason)
