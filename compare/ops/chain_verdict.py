"""The verdict on a whole core, from the findings about its operations.

The idea: the first operation that departs decides, in its own words; an error that no operation makes, but
that all of them add up to, is a suspect and no more. Bad input is decided before, as for the rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..report_words import number
from ..verdict import OpFinding, Ruling
from .chain import ChainTrial


def first_departing(findings: Sequence[OpFinding]) -> OpFinding | None:
    """The first operation that errs, or at which an error shows."""
    return next((f for f in findings if f.made or f.handed_on), None)


def chain_ruling(
    trial: ChainTrial, findings: Sequence[OpFinding], errors: Mapping[str, float | None]
) -> Ruling:
    """The verdict on the whole core."""
    first = first_departing(findings)
    made = [f for f in findings if f.made]
    contract = tuple(d for f in findings for d in f.contract_differences)
    outside = next((f for f in findings if f.verdict == "out-of-contract" and not f.handed_on), None)
    error = {"output": None, "state": None, **errors}
    common: dict[str, Any] = {"contract_differences": contract, "error": error, "error_pure": error}
    if outside is not None and (first is None or findings.index(outside) <= findings.index(first)):
        return Ruling(
            verdict="out-of-contract",
            tier=1,
            rule="domain",
            reason=f"{outside.op}: {outside.reason}",
            **common,
        )
    if first is None:
        worst = max((f.ratio_chain or 0.0 for f in findings), default=0.0)
        reason = f"no operation departs: at most {number(worst)} times an honest chain's error in RMS"
        if contract:
            reason += f"; under its contract only: {'; '.join(d.text for d in contract)}"
        return Ruling(verdict="pass", tier=3, rule="chain", reason=reason, ratio=worst, **common)
    verdict, reason = _words(first, made, findings)
    place = first.place
    finite = place is None or place.class_ == "wrong"
    return Ruling(
        verdict=verdict,  # type: ignore[arg-type]
        tier=3,
        rule="chain",
        reason=reason + (f"; {trial.stopped}" if trial.stopped else ""),
        first_nonfinite=None if finite else place,
        worst_tile=place if finite else None,
        ratio=first.ratio_chain,
        **{**common, "contract_differences": contract},
    )


def _words(first: OpFinding, made: Sequence[OpFinding], findings: Sequence[OpFinding]) -> tuple[str, str]:
    """The verdict and its sentence, for a chain in which something departs."""
    handed = [f.op for f in findings if f.handed_on and not f.made]
    if not made:
        return "suspect", (
            f"{first.op} is the first that departs, by errors handed on from operations within their limits: "
            f"{first.reason}"
        )
    words = f"{made[0].op} ({made[0].kernel}) makes the error: {made[0].reason}"
    if len(made) > 1:
        words += f"; so does {', '.join(f.op for f in made[1:])}"
    if handed:
        words += f"; handed on through {', '.join(handed)}"
    order = ("fail", "error", "timeout", "suspect")
    return next((v for v in order if any(f.verdict == v for f in made)), "fail"), words
