"""What the axes input_dtype, beta_dtype and g_dtype share: tensors of the case in another dtype.

The truth is that of the rounded values, so what is judged is how the kernel works in the dtype, not how much
the rounding of its input moves the answer.
"""

from __future__ import annotations

import msgspec

from .axis import Axis, Ran, Setup, Situation, always
from .dtype_names import SHORT, long_name, short_name, short_of

CAPTURED = "captured"


def dtype_axis(name: str, tensors: tuple[str, ...], what: str, *, order: int) -> Axis:
    """The axis that changes the dtype of some tensors."""

    def refuses(situation: Situation, value: str) -> str:
        if value == CAPTURED:
            return ""
        if all(situation.case[t].dtype == SHORT[value] for t in tensors):
            return f"as captured: {', '.join(tensors)} are {value} already"
        if name == "input_dtype" and long_name(value) not in situation.info.capabilities.input_dtypes:
            return f"the kernel takes {', '.join(map(short_name, situation.info.capabilities.input_dtypes))}"
        return ""

    def apply(setup: Setup, value: str) -> Setup:
        if value == CAPTURED:
            return setup
        changed = {t: setup.case[t].to(SHORT[value]) for t in tensors}
        return msgspec.structs.replace(setup, case=setup.case.with_tensors(**changed))

    def exercised(setup: Setup, ran: Ran) -> str:
        return ", ".join(f"{t} {short_of(setup.case[t].dtype)}" for t in tensors)

    return Axis(
        name=name,
        what=what,
        relation="the truth of the rounded tensors, tier 3 of the same dtypes",
        baseline=always(CAPTURED),
        values=lambda situation: [CAPTURED, *SHORT],
        refuses=refuses,
        apply=apply,
        exercised=exercised,
        valid=lambda text: text in (CAPTURED, *SHORT),
        alias=short_name,
        grammar=", ".join((CAPTURED, *SHORT)),
        order=order,
        work_around=name != "input_dtype",
    )
