"""Sequence permutation: where a sequence stands in a call says nothing about its result.

Statement. If the sequences of a call change places (with their initial states), results change places with
them. Empty sequences keep theirs: some kernels number chunks without them.
Exercised by the sequences that have moved.
Fires on: a wrong offset, state or chunk number of a sequence.
Silent on: rounding that depends on the place, where the contract does not promise bits.
"""

from __future__ import annotations

import msgspec
import torch

from ..inputs import Inputs
from .expectation import Expectation, Plan
from .perturb import generator

NAME = "sequence-permutation"


def plan(inputs: Inputs, *, seed: int) -> Plan:
    """One call with the sequences that have tokens in another order."""
    cu = inputs.cu_seqlens.cpu()
    lengths = cu.diff()
    filled = lengths.nonzero().flatten()
    if len(filled) < 2:
        return "fewer than two sequences have tokens"
    order = torch.arange(len(lengths))
    dice = generator(seed, 311)
    shuffled = filled[torch.randperm(len(filled), generator=dice)]
    order[filled] = filled.roll(1) if bool((shuffled == filled).all()) else shuffled
    rows = torch.cat([torch.arange(int(cu[n]), int(cu[n + 1])) for n in order.tolist()]).to(inputs.device)
    moved = order != torch.arange(len(order))
    order = order.to(inputs.device)
    state = inputs.initial_state
    changed = msgspec.structs.replace(
        inputs,
        **{name: getattr(inputs, name)[rows] for name in ("q", "k", "v", "g", "beta")},
        cu_seqlens=torch.cat([cu.new_zeros(1), lengths[order.cpu()].cumsum(0)]).to(inputs.device),
        initial_state=None if state is None else state[order],
    )
    own = torch.arange(inputs.n_tokens, device=inputs.device)
    return [
        Expectation(
            relation=NAME,
            inputs=changed,
            what="sequences",
            verb="in another order",
            output_rows=(rows, own),
            state_rows=(order, torch.arange(len(order), device=inputs.device)),
            exercised=int(moved.sum()),
            # Other lengths in front: cu_seqlens differs, so a kernel may cut its work otherwise.
            same_shape=False,
        )
    ]
