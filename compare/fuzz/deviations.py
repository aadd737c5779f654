"""On which axes a fuzz case departs from the baseline: drawn anew for every case.

The idea: the axes are the sweep's, with their own refusals and proofs; fuzzing only draws among them. By
default those that cost no compilation; an axis that the user names is drawn often, from the values given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...capture.errors import BadInput
from ..axes import life
from ..axes.axis import Situation
from ..axes.schedule import steps_of
from ..axes.table import AXES
from ..sweep.plan import Choice, choice_of
from .dice import Dice

# Axis -> (how often, values). Cuts are drawn among these and next to any multiple of 16 or 64.
USUAL: dict[str, tuple[float, tuple[str, ...]]] = {
    "split": (0.40, ("at-64n", "at-64n+1", "at-64n-1", "at-1", "at-T-1", "every-64", "near", "near")),
    "state": (0.15, ("stale", "stale-nan", "nan-pool", "huge-pool", "slot-order", "padding", "random")),
    "state_dtype": (0.08, ("bfloat16",)),
    "packing": (0.05, ("poisoned", "before", "behind")),
    "memory": (0.08, ("nan", "huge", "guard")),
    "life": (0.05, life.VALUES),
}
ASKED = 0.5  # how often an axis is drawn that the user named
NEAR = "near"
# Calls of one prefill at most: each further one is a round trip and a step of every emulation.
MOST_CALLS = 6


class Axes:
    """What may be drawn in a run."""

    def __init__(
        self, axes: Mapping[str, Sequence[str]], only: Sequence[str] = (), excepted: Sequence[str] = ()
    ) -> None:
        """Raises BadInput for an unknown axis or value, and for one that cases have instead."""
        choice: Choice = choice_of(axes, only, excepted)
        if "repeat" in choice.values or "repeat" in only:
            raise BadInput("axis repeat: fuzz repeats cases by itself; use gdncheck repeat for more runs")
        self.table: dict[str, tuple[float, tuple[str, ...]]] = {}
        unnamed = sorted(n for n in only if n not in USUAL and n not in choice.values)
        if unnamed:
            raise BadInput(f"axis {unnamed[0]}: say which values, e.g. --axis {unnamed[0]}=V1,V2")
        for name in AXES:
            if not choice.takes(name):
                continue
            if name in choice.values:
                self.table[name] = (ASKED, tuple(choice.values[name]))
            elif name in USUAL:
                self.table[name] = USUAL[name]

    def draw(self, dice: Dice) -> dict[str, str]:
        """{axis: value}; often none. What a case cannot take is dropped by `taken`."""
        found = {}
        for name, (often, values) in self.table.items():
            if dice.chance(often) and values:
                value = dice.one_of(values)
                found[name] = _near(dice) if value == NEAR else value
        return found

    def taken(
        self, drawn: Mapping[str, str], situation: Situation, baseline: Mapping[str, str]
    ) -> dict[str, str]:
        """What of a draw makes sense for a case."""
        found = {}
        for name, value in drawn.items():
            axis = AXES[name]
            if value == baseline[name] or axis.refuses(situation, value):
                continue
            if name == "split" and _calls(situation, value) > MOST_CALLS:
                continue
            found[name] = value
        return found


def _near(dice: Dice) -> str:
    """A cut next to a multiple of a chunk or of a sub-block."""
    edge = 64 * dice.between(1, 3) if dice.chance(0.6) else 16 * dice.between(1, 8)
    return f"at-{edge + dice.one_of((-1, 0, 1))}"


def _calls(situation: Situation, value: str) -> int:
    return len(steps_of(situation.case.lengths, value, seed=situation.seed))
