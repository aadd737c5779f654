"""The table of axes, in the order in which "first" counts: of two configurations with equally many
deviations, the one whose deviating axes stand higher here is reported.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...capture.errors import BadInput
from . import (
    autotune,
    beta_dtype,
    chunk_size,
    g_dtype,
    heads,
    input_dtype,
    l2norm,
    life,
    memory,
    packing,
    repeat,
    rounding,
    split,
    state,
    state_dtype,
)
from .axis import Axis

AXES: dict[str, Axis] = {
    axis.name: axis
    for axis in (
        chunk_size.AXIS,
        split.AXIS,
        packing.AXIS,
        state.AXIS,
        state_dtype.AXIS,
        input_dtype.AXIS,
        beta_dtype.AXIS,
        g_dtype.AXIS,
        rounding.AXIS,
        l2norm.AXIS,
        autotune.AXIS,
        memory.AXIS,
        heads.AXIS,
        life.AXIS,
        repeat.AXIS,
    )
}


def check_names(names: Iterable[str], where: str) -> None:
    """Raise BadInput for a name that is no axis."""
    for name in names:
        if name not in AXES:
            raise BadInput(f"{where}: {name!r} is no axis; axes are {', '.join(AXES)}")


def value_of(name: str, text: str, where: str) -> str:
    """A value as it is printed, of any spelling. Raises BadInput for a word that is none."""
    axis = AXES[name]
    value = text if axis.alias is None else axis.alias(text)
    if not axis.valid(value):
        raise BadInput(f"{where}: {text!r} is no value of {name}; values are {axis.grammar}")
    return value
