"""Which relations are run for a kernel, and in one batch.

The idea: a relation costs kernel runs, so there are two sets. `quick` is what a kernel gets that takes
seconds per call (Triton's interpreter, a long prompt on a CPU): the two whose breach no single call shows.
`all` is the table below. A relation that a contract does not promise is left out, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ...kernels.interface import KernelInfo
from ..inputs import Inputs
from . import causality, isolation, run_to_run
from .expectation import Expectation

Choice = Literal["auto", "none", "quick", "all"]
Planner = Callable[..., list[Expectation]]

# In the order in which a breach decides: the first explains those below it.
RELATIONS: dict[str, Planner] = {
    run_to_run.NAME: run_to_run.plan,
    causality.NAME: causality.plan,
    isolation.NAME: isolation.plan,
}
QUICK = (causality.NAME, isolation.NAME)
# A first call that took longer (seconds) makes `auto` quick; a busy machine makes no small case that slow.
SLOW_SECONDS = 20.0


def choose(choice: Choice, info: KernelInfo, seconds: float | None) -> tuple[str, ...]:
    """Names of the relations to run for a kernel whose first call took so long."""
    if choice == "none":
        return ()
    if choice == "all":
        return tuple(RELATIONS)
    slow = bool(info.environment.get("interpreted")) or (seconds or 0.0) > SLOW_SECONDS
    return QUICK if choice == "quick" or slow else tuple(RELATIONS)


def plan_relations(
    names: tuple[str, ...], inputs: Inputs, info: KernelInfo, *, seed: int
) -> list[Expectation]:
    """All calls that the named relations need, those that the contract does not promise left out."""
    planned: list[Expectation] = []
    for name in names:
        if info.contract.relation(name) != "not promised":
            planned += RELATIONS[name](inputs, seed=seed)
    return planned
