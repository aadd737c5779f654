"""Axis rounding: in the emulation, every named cast point in one format, or rounded at random.

For the emulation only: it tells which precision the data can bear. `bf16` rounds at every cast point at once;
`POINT:FORMAT` rounds at one. What fails is delta-debugged to the cast points that matter (`sweep.minimise`).
"""

from __future__ import annotations

import msgspec

from ...reference.precision import CAST_POINTS
from .axis import Axis, Ran, Setup, Situation, always

FORMATS = ("bf16", "fp16", "tf32", "fp32", "fp64")
VALUES = (*FORMATS, "stochastic")
EMULATION = "emulation."


def casts_of(value: str) -> dict[str, str]:
    """Cast point -> format of a value: all points of `bf16`, those named in `w:bf16/u:bf16`."""
    if value in FORMATS:
        return dict.fromkeys(CAST_POINTS, value)
    if value in ("native", "stochastic"):
        return {}
    return dict(part.split(":", 1) for part in value.split("/"))


def word_for(casts: dict[str, str]) -> str:
    """The value that names given cast points."""
    return "/".join(f"{point}:{fmt}" for point, fmt in casts.items())


def _valid(text: str) -> bool:
    if text in ("native", *VALUES):
        return True
    parts = [part.partition(":") for part in text.split("/")]
    return all(point in CAST_POINTS and fmt in FORMATS for point, _, fmt in parts)


def _refuses(situation: Situation, value: str) -> str:
    if value == "native" or situation.info.name.startswith(EMULATION):
        return ""
    return "only the emulation has cast points; real kernels take input_dtype, beta_dtype, state_dtype"


def _apply(setup: Setup, value: str) -> Setup:
    if value == "native":
        return setup
    extra = dict(setup.options.get("extra", {}))
    if value == "stochastic":
        extra |= {"mode": "stochastic", "seed": setup.seed}
    else:
        extra["casts"] = casts_of(value)
    return msgspec.structs.replace(
        setup, options={**setup.options, "extra": extra}, stochastic=value == "stochastic"
    )


def _exercised(setup: Setup, ran: Ran) -> str:
    extra = setup.options.get("extra", {})
    if setup.stochastic:
        return "every cast rounded at random" if ran.evidence.get("mode") == "stochastic" else ""
    return f"{len(extra.get('casts', {}))} cast points" if "precision" in ran.evidence else ""


AXIS = Axis(
    name="rounding",
    what="in the emulation, the format of every named cast point",
    relation="tier 3 of the kernel's native rounding (sqrt(2) times that where rounding is stochastic)",
    baseline=always("native"),
    values=lambda situation: ["native", *VALUES],
    refuses=_refuses,
    apply=_apply,
    exercised=_exercised,
    valid=_valid,
    grammar=", ".join(("native", *VALUES, "or POINT:FORMAT")),
    order=62,
)
