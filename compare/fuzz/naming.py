"""Attempts and signatures of fuzz cases: when two failures are the same one.

The idea: a case first shows a raw signature, with all the axes it happened to depart on. Confirming takes
away what does not matter, and gives the signature that is kept. What later shows the same class at the same
kind of place, with at least the deviations that matter, is that finding again, and costs no confirmation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from ...kernels.interface import KernelInfo
from ..axes.axis import Ran, Setup
from ..store import FindingRow, Signature
from ..sweep.attempt import Attempt
from ..sweep.explain import pattern
from ..sweep.judging import Judgement

COMES_AND_GOES = "comes and goes"
EVIDENCE = ("launched", "backend", "path", "version", "guard_written", "compile_failures")


def attempt_of(
    info: KernelInfo,
    label: str,
    config: Mapping[str, str],
    deviations: Mapping[str, str],
    setup: Setup,
    ran: Ran,
    judgement: Judgement,
) -> Attempt:
    """What became of one run, in the sweep's words."""
    ruling = judgement.ruling
    return Attempt(
        kernel=info.name,
        case=label,
        config=dict(config),
        deviations=dict(deviations),
        verdict=ruling.verdict,
        tier=ruling.tier,
        rule=ruling.rule,
        reason=ruling.reason,
        place=judgement.place,
        nonfinite=judgement.nonfinite,
        own_sequences=setup.own,
        contract_differences=tuple(d.text for d in ruling.contract_differences),
        error=ruling.error,
        margins=judgement.margins,
        seconds=ran.seconds,
        evidence={name: ran.evidence[name] for name in EVIDENCE if name in ran.evidence},
    )


def signature_of(attempt: Attempt, version: str | None, chunk_size: int | None) -> Signature:
    """The signature of a failing attempt, as `sweep` would give it."""
    place = attempt.place
    return Signature(
        kernel=attempt.kernel,
        version=version,
        tier=attempt.tier,
        class_="error" if attempt.kind == "error" else place.class_ if place is not None else "wrong",
        stage=None if place is None else place.tensor,
        deviations=dict(attempt.deviations),
        place_pattern=pattern(attempt, chunk_size),
    )


def unsteady(signature: Signature) -> Signature:
    """The signature of a failure that comes and goes: where it shows, and which check sees it, says
    nothing."""
    if signature.class_ == "error":
        return signature
    class_ = "moves" if signature.class_ == "wrong" else signature.class_
    return msgspec.structs.replace(signature, tier=None, class_=class_, place_pattern=COMES_AND_GOES)


def known_as(raw: Signature, findings: Iterable[FindingRow]) -> FindingRow | None:
    """The finding that a raw signature is, if it needs no confirmation of its own."""
    for row in findings:
        own = row.identity
        if own.kernel != raw.kernel or row.status == "not-reproduced":
            continue
        if not own.deviations.items() <= raw.deviations.items():
            continue
        if own.place_pattern == COMES_AND_GOES and own.class_ == unsteady(raw).class_:
            if own.stage == raw.stage or raw.class_ == "moves":
                return row
            continue
        same = (own.class_, own.stage, own.place_pattern) == (raw.class_, raw.stage, raw.place_pattern)
        if same and (own.tier == raw.tier or raw.class_ != "moves"):
            return row
    return None
