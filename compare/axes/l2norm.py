"""Axis l2norm: who normalises q and k, for a case whose q and k are raw."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from ...capture.case import Case
from .axis import Axis, Ran, Setup, Situation
from .recase import rule_only

VALUES = ("in-kernel", "before-rounded", "before-float32")
OPTION = {"in-kernel": "in_kernel", "before-rounded": "before"}
EPS = 1e-6  # inside the root, as in the rule
GIVEN = "given"


def _production(situation: Situation) -> str:
    if situation.case.options.qk != "raw":
        return GIVEN
    return "before-rounded" if situation.info.capabilities.l2norm == "before" else "in-kernel"


def _refuses(situation: Situation, value: str) -> str:
    if value == _production(situation):
        return ""
    if situation.case.options.qk != "raw":
        return "q and k of this case are normalised already"
    can = situation.info.capabilities.l2norm
    if value == GIVEN:
        return "q and k of this case are raw"
    if value == "in-kernel" and can == "before":
        return "the kernel has no l2norm of its own"
    if value == "before-float32" and "float32" not in situation.info.capabilities.input_dtypes:
        return "the kernel takes no float32 q, k, v"
    return ""


def _apply(setup: Setup, value: str) -> Setup:
    if value in OPTION:
        return msgspec.structs.replace(setup, options={**setup.options, "l2norm": OPTION[value]})
    if value == "before-float32":
        return msgspec.structs.replace(setup, case=_normalised(rule_only(setup.case)))
    return setup


def _normalised(case: Case) -> Case:
    """q, k divided by their norms in float32 and kept there; v goes along, as q, k and v share a dtype."""
    changed: dict[str, Any] = {"v": case["v"].float()}
    for name in ("q", "k"):
        x = case[name].float()
        changed[name] = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
    wide = case.with_tensors(**changed)
    return msgspec.structs.replace(wide, options=msgspec.structs.replace(case.options, qk="normalised"))


def _exercised(setup: Setup, ran: Ran) -> str:
    if setup.case.options.qk == "normalised":
        return f"q and k handed over normalised, {str(setup.case['q'].dtype).removeprefix('torch.')}"
    asked = setup.options.get("l2norm")
    said = ran.evidence.get("l2norm", asked)
    return f"l2norm {said}" if asked is not None and said in (asked, "given") else ""


AXIS = Axis(
    name="l2norm",
    what="who normalises q and k: the kernel, or the layer before it (rounded, or in float32)",
    relation="the truth of raw q and k, or of the normalised ones that were handed over",
    baseline=_production,
    values=lambda situation: [*VALUES],
    refuses=_refuses,
    apply=_apply,
    exercised=_exercised,
    valid=lambda text: text in (*VALUES, GIVEN),
    grammar=", ".join(VALUES),
    order=30,
    work_around=True,
)
