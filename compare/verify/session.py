"""One kernel on one verify step: run it, run it again, rule.

The idea: `session.diff_one` for steps of speculative decoding. Besides the answer itself (`step`), the same
call must give the same bits, also where fresh memory holds NaN.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from ...capture.case import Case
from ...kernels.interface import KernelCall, KernelInfo, RunResult
from ..checks import inputs_kept
from ..inputs import call_of
from ..soundness import Soundness
from ..verdict import DiffResult, Outcome, Place, Ruling, VerdictWord
from .step import NO_ERROR, judge_step

STATUS_VERDICT: dict[str, VerdictWord] = {
    "error": "error", "crash": "error", "timeout": "timeout", "refused": "skipped",
}  # fmt: skip
NEEDS = (
    "takes no columns of slots; a verify step is for vllm.verify, vllm.decode, sglang.verify, or a function "
    "that names pool, slot_indices and num_accepted and declares columns"
)


class Runner(Protocol):
    """An open kernel, or a double in a test."""

    @property
    def info(self) -> KernelInfo: ...

    def run(self, calls: list[KernelCall]) -> list[RunResult]: ...


def diff_step(
    runner: Runner, case: Case, soundness: Soundness, *, device: str = "cpu", seed: int = 0
) -> DiffResult:
    """Run a kernel on a verify step and rule on its answer.

    soundness: of the case; unsound input blames no kernel.
    """
    info = runner.info
    if not info.capabilities.columns:
        return _result(case, info, _word("skipped", f"{info.name} {NEEDS}"))
    missing = [name for name in ("pool", "slot_indices", "num_accepted") if case.get(name) is None]
    if missing:
        return _result(case, info, _word("skipped", f"the case has no {', '.join(missing)}"))
    call = call_of(case)
    first = runner.run([call])[0]
    if first.status != "ok":
        return _result(case, info, _word(STATUS_VERDICT[first.status], first.message or first.status), first)
    ruling = judge_step(case, info, first.outputs, device=device, seed=seed)
    if soundness.sound and ruling.verdict in ("pass", "suspect"):
        for outcome in _further(runner, call, first):
            ruling = msgspec.structs.replace(ruling, outcomes=(*ruling.outcomes, outcome))
            if outcome.status == "fires":
                ruling = msgspec.structs.replace(
                    ruling, verdict="fail", tier=outcome.tier, rule=outcome.check, reason=outcome.reason,
                    worst_tile=outcome.place,
                )  # fmt: skip
                break
    return _result(case, info, ruling, first)


def _further(runner: Runner, call: KernelCall, first: RunResult) -> list[Outcome]:
    """The inputs' bytes, and the same call again: plain, and with NaN in whatever memory is fresh."""
    outcomes = [inputs_kept.check(first.evidence, runner.info.contract, given=len(call.tensors))]
    poisoned = msgspec.structs.replace(call, options=msgspec.structs.replace(call.options, poison="nan"))
    again = (("run-to-run", call), ("fresh-memory", poisoned))
    for (name, _), result in zip(again, runner.run([c for _, c in again]), strict=True):
        promise = runner.info.contract.relation(name)
        if promise == "not promised" or result.status != "ok":
            reason = "not promised" if result.status == "ok" else result.message or result.status
            outcomes.append(Outcome(check=name, tier=4, status="not-applicable", reason=reason))
            continue
        outcomes.append(_same(name, call, first, result))
    return outcomes


def _same(name: str, call: KernelCall, first: RunResult, again: RunResult) -> Outcome:
    live = rows_of_live_sequences(call)
    for tensor in ("output", "pool"):
        a, b = first.outputs[tensor].cpu(), again.outputs[tensor].cpu()
        if tensor == "output":
            a, b = a[live], b[live]
        moved = ~((a == b) | (torch.isnan(a) & torch.isnan(b))).flatten(2).all(-1)
        if bool(moved.any()):
            row, head = moved.nonzero()[0].tolist()
            what = "state" if tensor == "pool" else "output"
            where = f"slot {row}" if tensor == "pool" else f"row {int(live[row])}"
            changed = "called again" if name == "run-to-run" else "called with NaN in fresh memory"
            return Outcome(
                check=name, tier=4, status="fires", place=Place(tensor=what, class_="moves", head=head),
                reason=f"{name}: {int(moved.sum())} rows of {what} move where the same step is {changed}, "
                f"first {where}, head {head}",
            )  # fmt: skip
    return Outcome(check=name, tier=4, status="ok", numbers={"rows": len(live)})


def rows_of_live_sequences(call: KernelCall) -> Tensor:
    """[R] packed rows of sequences that own slots; the others' rows hold anything."""
    from .step import live_lengths

    case = Case(op="verify", tensors=call.tensors)
    starts = call.tensors["cu_seqlens"].tolist()
    parts = [torch.arange(a, a + n) for a, n in zip(starts, live_lengths(case), strict=False)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def _word(verdict: VerdictWord, reason: str) -> Ruling:
    return Ruling(verdict=verdict, reason=reason, error=NO_ERROR)


def _result(case: Case, info: KernelInfo, ruling: Ruling, first: RunResult | None = None) -> DiffResult:
    evidence: dict[str, Any] = {} if first is None else first.evidence
    return DiffResult(
        kernel=info.name,
        case=str(case.path) if case.path is not None else case.label,
        layer=case.origin.layer,
        ruling=ruling,
        seconds=None if first is None else first.seconds,
        evidence=evidence,
    )
