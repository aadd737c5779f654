"""Axis state_dtype: the dtype of the pool, so the rounding of the state at each hand-over."""

from __future__ import annotations

import msgspec
import torch

from .axis import Axis, Ran, Setup, always, never_refuses
from .dtype_names import LONG, long_name
from .recase import rule_only

BASELINE = "float32"


def _apply(setup: Setup, value: str) -> Setup:
    if value == BASELINE:
        return setup
    case = rule_only(setup.case)
    state = case.get("initial_state")
    if state is not None:
        # The pool holds rounded states: that is what the truth starts from, too.
        case = case.with_tensors(initial_state=state.to(getattr(torch, value)))
    return msgspec.structs.replace(setup, case=case, state_dtype=value)


def _exercised(setup: Setup, ran: Ran) -> str:
    kept = ran.evidence.get("state_kept_in")
    return f"states kept in {kept} between {ran.calls} call(s)" if kept == setup.state_dtype and kept else ""


AXIS = Axis(
    name="state_dtype",
    what="the dtype in which the pool keeps the state between calls",
    relation="the truth of the case from the rounded state; tier 3 of the emulation with the same hand-over",
    baseline=always(BASELINE),
    values=lambda situation: [*LONG],
    refuses=never_refuses,
    apply=_apply,
    exercised=_exercised,
    valid=lambda text: text in LONG,
    alias=long_name,
    grammar=", ".join(LONG),
    order=45,
    work_around=True,
)
