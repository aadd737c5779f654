"""Axis life: the calls that a sequence has been through when its last token is run.

The numbers of the case stay as they are; what changes is how they are served: the last tokens decoded one by
one, or drafted and verified; preempted half way, the slot used by somebody else, and resumed; put into a slot
that was left a moment ago; run beside padded rows. The histories are `compare.life.named`'s.
"""

from __future__ import annotations

import msgspec

from ..life.named import NAMED
from .axis import Axis, Ran, Setup, Situation, always

BASELINE = "prefill"
VALUES = tuple(name for name in NAMED if name != BASELINE)
# What they do needs a second token: to be decoded, or guessed.
WITH_TAIL = ("prefill-decode", "verify-0", "verify-all", "padded")


def _refuses(situation: Situation, value: str) -> str:
    lengths = situation.case.lengths
    if value == BASELINE:
        return ""
    if max(lengths, default=0) == 0:
        return "the case has no token"
    if value in WITH_TAIL and max(lengths) < 2:
        return "no sequence has a second token to decode or to verify"
    if not situation.info.capabilities.varlen and len(lengths) > 1:
        return "the kernel takes one sequence per call"
    return ""


def _apply(setup: Setup, value: str) -> Setup:
    return msgspec.structs.replace(setup, life=value)


def _exercised(setup: Setup, ran: Ran) -> str:
    if setup.split != "none" or setup.slots is not None:
        return ""  # a history has its own schedule and its own pool
    if setup.life == "padded" and not ran.evidence.get("padded_rows"):
        return ""
    return str(ran.evidence.get("life", ""))


AXIS = Axis(
    name="life",
    what="what a sequence has been through: decode, verify, preempted and resumed, a slot handed on, padding",
    relation="the truth of the case; tier 3 of the emulation handed on at the same tokens; other slots kept",
    baseline=always(BASELINE),
    values=lambda situation: [BASELINE, *VALUES],
    refuses=_refuses,
    apply=_apply,
    exercised=_exercised,
    valid=lambda text: text in NAMED,
    grammar=", ".join(NAMED),
    order=75,
)
