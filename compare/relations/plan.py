"""Which relations are run for a kernel, and in what order.

The idea: a relation costs kernel runs, so there are three sets. `quick` is what a kernel gets that takes
seconds per call (Triton's interpreter, a long prompt on a CPU): the two whose breach no single call shows.
`all` is the table below; `auto` is all of it but those that need processes of their own, or quick where a
call is slow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ...kernels.interface import KernelCall, KernelInfo
from ..checkpoints import NAME as STORED
from ..inputs import Inputs
from ..trial import Trial
from . import (
    across_processes,
    batch_invariance,
    beta_zero,
    call_order,
    causality,
    causality_cuts,
    checkpoints,
    first_vs_warm,
    fresh_memory,
    head_permutation,
    isolation,
    padded_rows,
    power_of_two_scaling,
    prefix_state,
    rank_slice,
    run_to_run,
    sequence_permutation,
    silent_queries,
    slot_permutation,
    split_concat,
    unowned,
)
from .expectation import Plan

Choice = Literal["auto", "none", "quick", "all"]
Planner = Callable[[Inputs, int, KernelInfo, KernelCall], Plan]


def _plain(plan: Callable[..., Plan]) -> Planner:
    """A relation that needs to know nothing of the kernel."""
    return lambda inputs, seed, info, call: plan(inputs, seed=seed)


# In the order in which a breach decides: the first explains those below it.
RELATIONS: dict[str, Planner] = {
    run_to_run.NAME: _plain(run_to_run.plan),
    causality.NAME: _plain(causality.plan),
    # Its rows are the case's own, those of the cuts are not: it says better where.
    silent_queries.NAME: _plain(silent_queries.plan),
    causality_cuts.NAME: _plain(causality_cuts.plan),
    isolation.NAME: _plain(isolation.plan),
    fresh_memory.NAME: _plain(fresh_memory.plan),
    unowned.NAME: _plain(unowned.plan),
    padded_rows.NAME: lambda x, seed, info, call: padded_rows.plan(x, seed=seed, info=info),
    slot_permutation.NAME: lambda x, seed, info, call: slot_permutation.plan(
        x, seed=seed, info=info, call=call
    ),
    beta_zero.NAME: _plain(beta_zero.plan),
    prefix_state.NAME: _plain(prefix_state.plan),
    STORED: lambda x, seed, info, call: checkpoints.plan(x, info=info),
    split_concat.NAME: lambda x, seed, info, call: split_concat.plan(x, seed=seed, info=info),
    head_permutation.NAME: _plain(head_permutation.plan),
    rank_slice.NAME: _plain(rank_slice.plan),
    sequence_permutation.NAME: _plain(sequence_permutation.plan),
    power_of_two_scaling.NAME: _plain(power_of_two_scaling.plan),
    batch_invariance.NAME: _plain(batch_invariance.plan),
    call_order.NAME: _plain(call_order.plan),
    first_vs_warm.NAME: _plain(first_vs_warm.plan),
    across_processes.NAME: _plain(across_processes.plan),
}
QUICK = (causality.NAME, isolation.NAME)
# Relations that start processes: seconds each, so only where all are asked for.
WITH_PROCESSES = (first_vs_warm.NAME, across_processes.NAME)
# A first call that took longer (seconds) makes `auto` quick; a busy machine makes no small case that slow.
SLOW_SECONDS = 20.0


def choose(choice: Choice, info: KernelInfo, seconds: float | None) -> tuple[str, ...]:
    """Names of the relations to run for a kernel whose first call took so long."""
    if choice == "none":
        return ()
    if choice == "all":
        return tuple(RELATIONS)
    declared = info.environment.get("interpreted") and info.capabilities.max_tokens_cpu is not None
    slow = bool(declared) or (seconds or 0.0) > SLOW_SECONDS
    if choice == "quick" or slow:
        return QUICK
    return tuple(name for name in RELATIONS if name not in WITH_PROCESSES)


def plan_relation(name: str, trial: Trial, call: KernelCall, *, seed: int) -> Plan:
    """The calls that a relation needs of this kernel, or why it has nothing to ask."""
    return RELATIONS[name](trial.witness.inputs, seed, trial.info, call)
