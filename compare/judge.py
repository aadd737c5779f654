"""The judge: orders what the checks found and lets the first that fires decide.

The idea: a verdict is a walk down one list. A non-finite value on the case itself comes first, because it
needs no yardstick; then the tiers from the ones without a tolerance (exact, bounds) to the ones with; the
relations last. Suspects decide only where nothing fires. Bad input is decided before any of them, and then
no kernel is blamed. Running kernels and printing are `session` and `report`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from .checks import (
    companion,
    emulation_ratio,
    exact,
    low_bits,
    nonfinite,
    output_bound,
    running_bound,
    state_bound,
)
from .checks import tolerance as by_tolerance
from .contract_differences import contract_differences, errors_against_pure
from .hypotheses import explain
from .nonfinite import first_place
from .relations import run_to_run
from .report_words import number
from .soundness import Soundness, containment, resets_promised, without_resets
from .tolerances import Tolerance
from .trial import TENSORS, Trial
from .verdict import ContractDifference, Outcome, Place, Ruling

Check = Callable[[Trial], Outcome]

# In the order in which they decide.
CASE_CHECKS: tuple[Check, ...] = (
    nonfinite.check,
    exact.check,
    state_bound.check,
    output_bound.check,
    running_bound.check,
    emulation_ratio.check,
    low_bits.check,
)
# What a caller's tolerance stands in for.
REPLACED = (running_bound.check, emulation_ratio.check, low_bits.check)
# Checks whose place is a tile of the case itself.
ON_THE_CASE = frozenset(
    {"exact", "state-bound", "output-bound", "running-bound", "emulation-ratio", "low-bits", "tolerance"}
)


def judge(
    trial: Trial,
    soundness: Soundness,
    further: list[Outcome],
    *,
    tolerance: Mapping[str, Tolerance] | None = None,
) -> Ruling:
    """Rule on one kernel's answer.

    tolerance: of a caller who insists, by tensor; it stands in for tiers 2 and 3 there.
    further: outcomes that needed runs of their own (the exact companion, relations), in order.
    """
    if not soundness.sound:
        return _out_of_contract(trial, soundness)
    tolerance = {name: t for name, t in (tolerance or {}).items() if name in trial.measured}
    rest = trial.without(tolerance) if tolerance else trial
    outcomes = [
        check(rest if check in REPLACED else trial)
        for check in CASE_CHECKS
        if rest.measured or check not in REPLACED
    ]
    if tolerance:
        outcomes.append(by_tolerance.check(trial, tolerance))
    ruling = _decide(trial, soundness, outcomes, further)
    return msgspec.structs.replace(ruling, by_tolerance=tuple(tolerance))


def _decide(trial: Trial, soundness: Soundness, outcomes: list[Outcome], further: list[Outcome]) -> Ruling:
    """Let the first outcome that fires decide. outcomes: the case's own, in CASE_CHECKS' order."""
    # The companion is tier 0: it decides right after the case's own exact check. But it is another call, and
    # says nothing of this one where the kernel moves by itself.
    companions = [o for o in further if o.check == companion.NAME]
    moving = [o for o in further if o.check == run_to_run.NAME and o.status == "fires"]
    after_exact = 2
    ordered = [
        *outcomes[:after_exact],
        *moving,
        *companions,
        *outcomes[after_exact:],
        *(o for o in further if o not in companions and o not in moving),
    ]
    decisive = next((o for o in ordered if o.status == "fires"), None)
    if decisive is not None and soundness.reset and not resets_promised(trial):
        rest = without_resets(trial)
        if decisive in outcomes and all(check(rest).status != "fires" for check in CASE_CHECKS):
            reason = (
                f"{soundness.reset}, which the contract does not promise to take; there {decisive.reason}"
            )
            return _ruling(trial, "out-of-contract", decisive, ordered, reason)
    if decisive is not None:
        return _failed(trial, decisive, ordered)
    decisive = next((o for o in ordered if o.status == "suspect"), None)
    if decisive is not None:
        return _ruling(trial, "suspect", decisive, ordered, decisive.reason)
    return _pass(trial, ordered)


def _failed(trial: Trial, decisive: Outcome, ordered: list[Outcome]) -> Ruling:
    """Fail; or suspect, where a transform that a sound kernel may have explains everything that fires."""
    guess = explain(trial, ordered)
    reason = _reason(decisive, ordered)
    if guess is None:
        return _ruling(trial, "fail", decisive, ordered, reason)
    verdict = "suspect" if guess.excusable else "fail"
    if guess.excusable:
        reason += f"; no declared clause explains it, but every tile agrees if {guess.text} (a hypothesis)"
    else:
        reason += f"; it looks as if {guess.text}"
    ruling = _ruling(trial, verdict, decisive, ordered, reason)
    return msgspec.structs.replace(ruling, hypothesis=guess)


def _reason(decisive: Outcome, ordered: list[Outcome]) -> str:
    """The deciding sentence; and what the case itself shows where a companion decided."""
    others = [o for o in ordered if o.status == "fires" and o is not decisive]
    if decisive.check in ON_THE_CASE or decisive.check == nonfinite.NAME or not others:
        return decisive.reason
    return f"{decisive.reason}; on the case itself: {others[0].reason}"


def _pass(trial: Trial, ordered: list[Outcome]) -> Ruling:
    by_name = {o.check: o for o in ordered}
    own = by_name[exact.NAME]
    decisive = own if own.status == "ok" else by_name.get(by_tolerance.NAME) or by_name[emulation_ratio.NAME]
    differences = contract_differences(trial)
    if decisive.check == exact.NAME:
        reason = "exact case: every bit agrees with the truth"
    elif decisive.check == by_tolerance.NAME:
        reason = decisive.reason
    elif decisive.status == "not-applicable":
        reason = f"no check fired; {decisive.reason}"
    else:
        n = decisive.numbers
        rms = max(n.get("output_rms_ratio", 0.0), n.get("state_rms_ratio", 0.0))
        peak = max(n.get("output_max_ratio", 0.0), n.get("state_max_ratio", 0.0))
        reason = (
            f"every tile errs as its precision ({n['profile']}) explains: at most {number(rms)} times "
            f"the emulation in RMS (limit {number(n['rms_limit'])}), {number(peak)} in the largest entry "
            f"(limit {number(n['max_limit'])})"
        )
    if differences:
        reason += f"; under its contract only: {'; '.join(d.text for d in differences)}"
    return _ruling(trial, "pass", decisive, ordered, reason, differences)


def _out_of_contract(trial: Trial, soundness: Soundness) -> Ruling:
    did = containment(trial, soundness)
    outcome = Outcome(
        check="domain",
        tier=1,
        status="fires",
        reason=f"{soundness.reason}; {did.reason}",
        numbers=did.numbers,
    )
    ruling = _ruling(trial, "out-of-contract", outcome, [outcome, did], outcome.reason)
    return ruling


def _ruling(
    trial: Trial,
    verdict: str,
    decisive: Outcome,
    ordered: list[Outcome],
    reason: str,
    differences: tuple[ContractDifference, ...] = (),
) -> Ruling:
    ratio = next((o for o in ordered if o.check == emulation_ratio.NAME), None)
    largest = None
    if ratio is not None and ratio.status != "not-applicable":
        largest = max(
            (float(ratio.numbers.get(f"{t}_rms_ratio", 0.0)) for t in TENSORS if t in trial.measured),
            default=None,
        )
    return Ruling(
        verdict=verdict,  # type: ignore[arg-type]
        tier=decisive.tier,
        rule=decisive.check,
        reason=reason,
        contract_differences=differences,
        first_nonfinite=_first_nonfinite(trial, verdict),
        worst_tile=_worst_tile(verdict, decisive, ordered),
        error_pure=errors_against_pure(trial),
        error={name: trial.measured[name].relative if name in trial.measured else None for name in TENSORS},
        ratio=largest,
        outcomes=tuple(ordered),
    )


def _first_nonfinite(trial: Trial, verdict: str) -> Place | None:
    """The first one that nothing explains; for bad input, the first one at all."""
    for unexplained in (True, False) if verdict == "out-of-contract" else (True,):
        for name in TENSORS:
            measured = trial.measured.get(name)
            place = first_place(measured.masks, measured.tiles, unexplained=unexplained) if measured else None
            if place is not None:
                return place
    return None


def _worst_tile(verdict: str, decisive: Outcome, ordered: list[Outcome]) -> Place | None:
    """The tile of the case with the largest ratio where one is wrong, else the place of what decided."""
    if verdict not in ("fail", "suspect"):
        return None
    if verdict == "fail":
        for name in (emulation_ratio.NAME, *ON_THE_CASE):
            place = next(
                (o.place for o in ordered if o.check == name and o.status == "fires" and o.place), None
            )
            if place is not None:
                return place
    return decisive.place
