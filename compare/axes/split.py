"""Axis split: the prefill schedule, with the state handed on through a simulated pool."""

from __future__ import annotations

import msgspec

from .axis import Axis, Ran, Setup, Situation, always
from .schedule import GRAMMAR, is_schedule, steps_of

VALUES = (
    "every-64", "every-2048", "every-8192", "at-64n", "at-64n+1", "at-64n-1", "at-1", "at-T-1", "random",
)  # fmt: skip


def _refuses(situation: Situation, value: str) -> str:
    lengths = situation.case.lengths
    if value != "none" and len(steps_of(lengths, value, seed=situation.seed)) < 2:
        return f"no sequence is cut: the longest has {max(lengths, default=0)} tokens"
    return ""


def _apply(setup: Setup, value: str) -> Setup:
    return msgspec.structs.replace(setup, split=value)


def _exercised(setup: Setup, ran: Ran) -> str:
    return f"{ran.calls} calls, the state handed on between them" if ran.calls > 1 else ""


AXIS = Axis(
    name="split",
    what="where a prefill is cut into calls that hand the state on",
    relation="the truth of the uncut case; tier 3 of the emulation cut at the same tokens",
    baseline=always("none"),
    values=lambda situation: ["none", *VALUES],
    refuses=_refuses,
    apply=_apply,
    exercised=_exercised,
    valid=is_schedule,
    grammar=GRAMMAR,
    order=70,
)
