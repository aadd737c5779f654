"""Rank slice: the heads of one rank alone give their slice of what all heads give.

Statement. At tensor parallelism 2, 4 or 8 a rank works on consecutive key heads and their value heads, and
each head's result depends on its own inputs. So the call with one rank's heads gives the slice of the whole
call's outputs and states. Another head count is another compilation and another autotune key, so bits may be
lost, within tier 3, unless the contract promises them.
Fires on: a head whose result depends on how many there are (a stride, a hard-coded count, a wrong grouping).
Silent on: head counts that the ranks do not share evenly, which are named as the reason.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from ...kernels.interface import RunResult
from ..axes.rank import not_shared, own_heads
from ..inputs import Inputs
from ..trial import Trial
from ..verdict import Outcome, Place
from .compare_runs import compare_runs
from .expectation import Expectation, Plan, no_rows, same_rows

NAME, TIER = "rank-slice", 4
RANKS = (2, 4, 8)


def plan(inputs: Inputs, *, seed: int) -> Plan:
    """The first and the last rank of the smallest group, the last of the larger ones."""
    del seed
    n_key, n_value = inputs.q.shape[1], inputs.heads
    groups = [ranks for ranks in RANKS if not not_shared(n_key, n_value, ranks)]
    if not groups:
        return not_shared(n_key, n_value, RANKS[0])
    shares = [(groups[0], 0), *((ranks, ranks - 1) for ranks in groups)]
    return [_expectation(inputs, ranks, rank) for ranks, rank in shares]


def _expectation(inputs: Inputs, ranks: int, rank: int) -> Expectation:
    key = own_heads(inputs.q.shape[1], ranks, rank).to(inputs.device)
    value = own_heads(inputs.heads, ranks, rank).to(inputs.device)
    state = inputs.initial_state
    share = msgspec.structs.replace(
        inputs, q=inputs.q[:, key].contiguous(), k=inputs.k[:, key].contiguous(),
        v=inputs.v[:, value].contiguous(), g=inputs.g[:, value].contiguous(),
        beta=inputs.beta[:, value].contiguous(),
        initial_state=None if state is None else state[:, value].contiguous(),
    )  # fmt: skip
    return Expectation(
        relation=NAME, inputs=share, what=f"the heads of rank {rank} of {ranks}", verb="alone",
        output_rows=no_rows(inputs.device), state_rows=no_rows(inputs.device),
        judge=_judge(value, f"rank {rank} of {ranks}"), exercised=inputs.n_tokens * len(value),
        same_shape=False,
    )  # fmt: skip


def _judge(value: torch.Tensor, which: str) -> Callable[[Trial, RunResult], Outcome]:
    def judge(trial: Trial, result: RunResult) -> Outcome:
        return compare_slice(trial, value, which, result)

    return judge


def compare_slice(trial: Trial, value: torch.Tensor, which: str, result: RunResult) -> Outcome:
    """Put the rank's results in the place of their heads in the whole call's, and compare.

    value: [HV of the rank] its value heads.
    """
    output = _grafted(trial.output, value, result.outputs["output"])
    state = None if trial.state is None else _grafted(trial.state, value, result.outputs.get("final_state"))
    if output is None or (trial.state is not None and state is None):
        reason = f"{NAME}: {which} came back in another dtype or shape than all heads"
        place = Place(tensor="output", class_="wrong")
        return Outcome(check=NAME, tier=TIER, status="fires", reason=reason, place=place)
    inputs = trial.witness.inputs
    whole = Expectation(
        relation=NAME, inputs=inputs, what=f"the heads of {which}", verb="alone", lenient=True,
        output_rows=same_rows(torch.arange(inputs.n_tokens, device=inputs.device)),
        state_rows=same_rows(torch.arange(inputs.n_sequences, device=inputs.device)),
    )  # fmt: skip
    contract = trial.info.contract
    bound = contract.relation(NAME) == contract.relation("batch-invariance") == "promised"
    promise = "promised" if bound else "observed"
    return compare_runs(trial, whole, output, state, promise=promise, steady=True)  # type: ignore[arg-type]


def _grafted(whole: torch.Tensor, value: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor | None:
    """The whole with some heads replaced; None where the part does not fit."""
    shape = (whole.shape[0], len(value), *whole.shape[2:])
    if part is None or part.shape != shape or part.dtype != whole.dtype:
        return None
    grafted = whole.clone()
    grafted[:, value.to(whole.device)] = part.to(whole.device)
    return grafted
