"""The ruling on one kernel's answer to one operation: the same words and order as for the rule (`judge`).

The idea: bad input first, and then no kernel is blamed; then the checks in their order, the first that fires
decides; a departure that a guess explains is named by it, and is a suspect only if a sound kernel may compute
that. Agreement that needs a declared transform is a pass with a contract difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from ...kernels.interface import RunResult
from ..contract_differences import percent
from ..report_words import number
from ..tiles import row_errors, tile_errors, unit_roundoff
from ..verdict import ContractDifference, Hypothesis, Outcome, Ruling
from .checks import CHECKS, check_nonfinite, check_ratio, ratio_outcome
from .op import Guess, OpFinding, OpInputs
from .trial import OpTrial

STATE_OF = {"conv": "final_conv_state", "conv-update": "final_conv_state"}
# A guess that explains less than this share of the departure, in squares, is not one.
EXPLAINS = 0.99


def judge_op(trial: OpTrial, further: Sequence[Outcome] = ()) -> Ruling:
    """Rule on an answer whose shapes are right. further: outcomes that needed runs of their own."""
    findings = list(trial.op.domain(trial.inputs, trial.casts))
    if findings:
        return _out_of_contract(trial, findings)
    own = [check(trial) for check in (*CHECKS, *trial.op.checks)]
    outcomes = [*own, *further]
    decisive = next((o for o in outcomes if o.status == "fires"), None)
    if decisive is None:
        doubt = next((o for o in outcomes if o.status == "suspect"), None)
        if doubt is not None:
            return _ruling(trial, "suspect", doubt, outcomes, doubt.reason)
        return _pass(trial, outcomes)
    # What only another call shows is no departure of this answer, and nothing here can explain it.
    guess = explain(trial) if any(o is decisive for o in own) else None
    if guess is None:
        return _ruling(trial, "fail", decisive, outcomes, decisive.reason)
    hypothesis = Hypothesis(
        clause=f"{trial.op.name}: {guess.text}", text=guess.text, excusable=guess.excusable, explained=1.0
    )
    words = (
        f"no declared clause explains it, but every tile agrees if {guess.text} (a hypothesis)"
        if guess.excusable
        else f"it looks as if {guess.text}"
    )
    verdict = "suspect" if guess.excusable else "fail"
    ruling = _ruling(trial, verdict, decisive, outcomes, f"{decisive.reason}; {words}")
    return msgspec.structs.replace(ruling, hypothesis=hypothesis)


def explain(trial: OpTrial) -> Guess | None:
    """The first guess under which every output errs no more than its precision explains."""
    for guess in trial.op.guesses:
        changed = guess.change(trial.under_clauses)
        if changed.tensors.keys() != trial.inputs.tensors.keys() and not changed.tensors:
            continue
        if _agrees(trial, changed):
            return guess
    return None


def _agrees(trial: OpTrial, changed: OpInputs) -> bool:
    truth = trial.op.truth(changed)
    measured = trial.measure(truth)
    if any(m.masks.n_unexplained for m in measured.values()):
        return False
    if ratio_outcome(measured, trial.scales_of(changed, truth), trial.inputs.heads).status != "ok":
        return False
    departs = [name for name in measured if _departs(trial, name)]
    for name in departs:
        before = float(trial.measured[name].rows.square.sum())
        if before and float(measured[name].rows.square.sum()) > (1 - EXPLAINS) * before:
            return False
    return bool(departs)


def _departs(trial: OpTrial, name: str) -> bool:
    """Whether one output is wrong by size; what is wrong by class alone has no size to explain."""
    one = {name: trial.measured[name]}
    return ratio_outcome(one, trial.scales, trial.inputs.heads).status == "fires"


def unanswered_op(result: RunResult) -> Ruling:
    """The ruling on a kernel that gave no result."""
    from ..session import unanswered

    return unanswered(result)


def _pass(trial: OpTrial, outcomes: Sequence[Outcome]) -> Ruling:
    by_name = {o.check: o for o in outcomes}
    exact, ratio = by_name["exact"], by_name["emulation-ratio"]
    differences = op_differences(trial)
    if exact.status == "ok" and exact.numbers["exact"] == exact.numbers["entries"]:
        decisive, reason = exact, "exact case: every bit agrees with the truth"
    else:
        decisive = ratio
        rms = max((v for k, v in ratio.numbers.items() if k.endswith("_rms_ratio")), default=0.0)
        peak = max((v for k, v in ratio.numbers.items() if k.endswith("_max_ratio")), default=0.0)
        reason = (
            f"every tile errs as its precision explains: at most {number(rms)} times the emulation in RMS, "
            f"{number(peak)} in the largest entry"
        )
        if exact.status == "ok":
            reason += f"; {exact.numbers['exact']} entries that need no rounding agree bit for bit"
    if differences:
        reason += f"; under its contract only: {'; '.join(d.text for d in differences)}"
    return _ruling(trial, "pass", decisive, outcomes, reason, differences)


def op_differences(trial: OpTrial) -> tuple[ContractDifference, ...]:
    """Transforms without which the answer departs, with their sizes, and a beta kept in few bits."""
    found = []
    pure = trial.op.truth(trial.inputs)
    if trial.clauses:
        scales = trial.scales_of(trial.inputs, pure)
        if ratio_outcome(trial.measure(pure), scales, trial.inputs.heads).status == "fires":
            found = [_difference(trial, clause) for clause in trial.clauses]
    stored = trial.info.contract.find("beta.dtype")
    if stored is not None and "beta" in trial.outputs:
        found.append(_stored_beta(trial, str(stored.value)))
    return tuple(d for d in found if d is not None)


def _difference(trial: OpTrial, clause: object) -> ContractDifference | None:
    pure, other = trial.op.truth(trial.inputs), trial.op.truth(trial.op.under(trial.inputs, (clause,)))
    size, tokens = 0.0, 0
    for name, measured in trial.measure(pure).items():
        rows = row_errors(other[name].reshape(measured.want.shape), measured.want, stored=measured.got.dtype)
        table = tile_errors(rows, measured.tiles)
        share = (table.rms / table.truth_rms)[table.truth_rms > 0]
        size = max(size, float(share.max()) if share.numel() else 0.0)
        if measured.tiles.token_of_row is not None:
            moved = rows.square.sqrt() > unit_roundoff(measured.got.dtype) * rows.truth_square.sqrt()
            tokens = max(tokens, int(moved.any(-1).sum()))
    if size == 0:
        return None
    value = clause.value  # type: ignore[attr-defined]
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    name = clause.id  # type: ignore[attr-defined]
    text = f"{name.replace('.', ' ')} {shown}: {tokens} tokens, {percent(size)}"
    return ContractDifference(clause=name, size=size, tokens=tokens, text=text)


def _stored_beta(trial: OpTrial, dtype: str) -> ContractDifference | None:
    """What a narrow beta costs against the pure one."""
    true, kept = trial.truth["beta"], trial.outputs["beta"].double()
    off = torch.where(true != 0, (kept - true).abs() / true.abs(), 0.0)
    off = off[torch.isfinite(off)]
    size = float(off.max()) if off.numel() else 0.0
    tokens = int(((kept - true).abs() > 2.0**-24 * true.abs()).any(-1).sum())
    if size <= 2.0**-22:
        return None
    text = f"beta dtype {dtype}: {tokens} tokens, {percent(size)}"
    return ContractDifference(clause="beta.dtype", size=size, tokens=tokens, text=text)


def _out_of_contract(trial: OpTrial, findings: Sequence[OpFinding]) -> Ruling:
    """Bad input: named first; then whether the damage stayed where the formula has it."""
    worst = findings[0]
    place = _named(trial.inputs, worst)
    did = _containment(trial)
    reason = f"the input is outside the domain: {worst.text} ({place}); {did.reason}"
    outcome = Outcome(check="domain", tier=1, status="fires", reason=reason)
    return _ruling(trial, "out-of-contract", outcome, [outcome, did], reason)


def _named(inputs: OpInputs, finding: OpFinding) -> str:
    if finding.tensor in ("A_log", "dt_bias"):
        return f"head {finding.row}"
    if finding.tensor in ("norm_weight", "conv_weight", "conv_bias"):
        return f"index {finding.row}"
    cu = inputs.cu_seqlens
    sequence = int((cu[1:] <= finding.row).sum())
    return f"sequence {sequence}, token {finding.row - int(cu[sequence])}"


def _containment(trial: OpTrial) -> Outcome:
    """Rows that the formula keeps finite are finite and right."""
    mask, ratio = check_nonfinite(trial), check_ratio(trial)
    for outcome in (mask, ratio):
        if outcome.status == "fires":
            reason = f"there the kernel departs: {outcome.reason}"
            return Outcome(check="containment", tier=1, status="ok", reason=reason, place=outcome.place)
    return Outcome(
        check="containment", tier=1, status="ok", reason="the kernel does with it what the formula does"
    )


def _ruling(
    trial: OpTrial,
    verdict: str,
    decisive: Outcome,
    outcomes: Sequence[Outcome],
    reason: str,
    differences: tuple[ContractDifference, ...] = (),
) -> Ruling:
    place = decisive.place
    finite = place is None or place.class_ == "wrong"
    ratio = next((o for o in outcomes if o.check == "emulation-ratio"), None)
    rms = [v for k, v in ratio.numbers.items() if k.endswith("_rms_ratio")] if ratio is not None else []
    state = STATE_OF.get(trial.op.name)
    errors: dict[str, float | None] = {name: m.relative for name, m in trial.measured.items()}
    main = next(name for name in trial.op.outputs if name != state)
    pure = trial.measured if not trial.clauses else trial.measure(trial.op.truth(trial.inputs))
    return Ruling(
        verdict=verdict,  # type: ignore[arg-type]
        tier=decisive.tier,
        rule=decisive.check,
        reason=reason,
        contract_differences=differences,
        first_nonfinite=None if finite else place,
        worst_tile=place if finite and verdict in ("fail", "suspect") else None,
        error={"output": errors[main], "state": errors.get(state) if state else None, **errors},
        error_pure={
            "output": pure[main].relative,
            "state": pure[state].relative if state else None,
            **{name: m.relative for name, m in pure.items()},
        },
        ratio=max(rms, default=None),
        outcomes=tuple(outcomes),
    )
