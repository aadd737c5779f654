"""One kernel on one operation: run it, run it again, rule on its answer.

The idea: an operation costs nothing beside the rule, so every call is made twice: the second must give the
same bits. Everything else is `judge`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor

from ...kernels.interface import KernelCall, KernelInfo, RunResult
from ...kernels.protocol import same_bytes
from ..checks import inputs_kept
from ..session import Runner
from ..verdict import Outcome, Place, Ruling
from .checks import check_shapes
from .inputs import call_of_op
from .judge import judge_op, unanswered_op
from .op import Op, OpInputs
from .trial import OpTrial

OWN = frozenset({"conv_pool", "conv_state"})


class OpAnswer(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A kernel's ruling on one operation, and what it answered."""

    ruling: Ruling
    outputs: dict[str, Tensor] = {}
    trial: Any = None
    """OpTrial where the answer had the right shapes."""
    seconds: float | None = None
    evidence: dict[str, Any] = {}


def diff_op(runner: Runner, op: Op, inputs: OpInputs, *, seed: int = 0, repeats: int = 2) -> OpAnswer:
    """Run an operation's kernel on given inputs, and on what the operation asks for besides; rule on it."""
    call = call_of_op(op.name, inputs)
    results = runner.run([call] * repeats)
    further = op.further(runner, op, inputs, seed) if op.further and results[0].status == "ok" else []
    return rule_on(op, inputs, runner.info, results, call, further=further, seed=seed)


def rule_on(
    op: Op,
    inputs: OpInputs,
    info: KernelInfo,
    results: Sequence[RunResult],
    call: KernelCall,
    *,
    further: Sequence[Outcome] = (),
    seed: int = 0,
) -> OpAnswer:
    """Rule on the results of one call made several times. further: outcomes of other calls."""
    first = results[0]
    if first.status != "ok":
        return OpAnswer(ruling=unanswered_op(first), evidence=first.evidence)
    fault = check_shapes(op, inputs, first.outputs)
    if fault is not None:
        ruling = Ruling(
            verdict="fail", tier=fault.tier, rule=fault.check, reason=fault.reason, worst_tile=fault.place,
            error={"output": None, "state": None}, outcomes=(fault,),
        )  # fmt: skip
        return OpAnswer(ruling=ruling, outputs=first.outputs, seconds=first.seconds, evidence=first.evidence)
    owned, outputs = op.owned(inputs, dict(first.outputs))
    beside = [op.beside(inputs, first.outputs, first.evidence)] if op.beside else []
    if not len(owned.tensors[op.reads]):
        return OpAnswer(ruling=nobodys(beside), outputs=first.outputs, evidence=first.evidence)
    trial = OpTrial(op, owned, info, outputs, seed=seed)
    kept = inputs_kept.check(_undisturbed(first.evidence), info.contract, given=len(call.tensors))
    repeats = [moves(outputs, again, lambda x: op.owned(inputs, x)[1]) for again in results[1:]]
    return OpAnswer(
        ruling=judge_op(trial, [*beside, kept, *repeats, *further]),
        outputs=first.outputs,
        trial=trial,
        seconds=first.seconds,
        evidence=first.evidence,
    )


def _undisturbed(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """A kernel may write its own state in place."""
    return {**evidence, "inputs_written": [n for n in evidence.get("inputs_written", ()) if n not in OWN]}


def nobodys(beside: Sequence[Outcome]) -> Ruling:
    """The ruling on a call of padded rows alone: only what it wrote elsewhere can be wrong."""
    error: dict[str, float | None] = {"output": None, "state": None}
    for outcome in beside:
        if outcome.status == "fires":
            return Ruling(
                verdict="fail", tier=outcome.tier, rule=outcome.check, reason=outcome.reason,
                worst_tile=outcome.place, error=error, outcomes=tuple(beside),
            )  # fmt: skip
    reason = "no row of the call is anybody's, and nothing else was written"
    return Ruling(verdict="pass", reason=reason, error=error, outcomes=tuple(beside))


def moves(
    first: Mapping[str, Tensor],
    again: RunResult,
    owned: Callable[[dict[str, Tensor]], Mapping[str, Tensor]] = dict,
) -> Outcome:
    """The same call gives the same bits, in the rows that somebody reads."""
    if again.status != "ok":
        reason = f"the second call gave no result ({again.message or again.status})"
        return Outcome(check="run-to-run", tier=4, status="fires", reason=reason)
    second = owned(dict(again.outputs))
    for name, tensor in first.items():
        other = second.get(name)
        if other is None or not same_bytes(tensor, other):
            reason = f"{name} has other bits in the second of two equal calls"
            place = Place(tensor=name, class_="moves")
            return Outcome(check="run-to-run", tier=4, status="fires", reason=reason, place=place)
    return Outcome(check="run-to-run", tier=4, status="ok", numbers={"exercised": 1})
