"""A synthetic verify step: a case's sequences on columns of slots in a pool that others use too.

The idea: whatever a kernel could read by mistake must be wrong. So every slot that is not a start holds
another tenant's state of the same size, slots are out of order, and how much of the step before was accepted
differs between sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..case import Case, starting_state
from .portable import Draw

SPARE_SLOTS = 3


def verify_step(case: Case, draft: int, draw: Draw) -> dict[str, Tensor]:
    """The tensors that make a rule case (initial_state or none) a verify step with 1 + draft columns.

    Sequences keep their lengths, at most 1 + draft. Returns pool, slot_indices, num_accepted, draft.
    """
    columns, n = 1 + draft, case.n_sequences
    heads, value = case["v"].shape[1:]
    shape = (n * columns + SPARE_SLOTS, heads, case["k"].shape[-1], value)
    state = starting_state(case)
    if state is None:
        state = torch.zeros(n, *shape[1:])
    size = float(state.double().square().mean().sqrt()) or 1.0
    # Whole multiples of a power of two: exact cases stay exact wherever a kernel reads.
    others = draw.integers("verify.pool", *shape, low=-8, high=8).double()
    unit = 2.0 ** round(torch.tensor(size / 4).log2().item())
    pool = (others * unit).to(state.dtype)
    slots = torch.argsort(draw.uniform("verify.slots", shape[0]))[: n * columns].view(n, columns)
    accepted = draw.integers("verify.accepted", n, low=1, high=columns).long()
    pool[slots.gather(1, (accepted - 1)[:, None])[:, 0]] = state
    lengths = torch.tensor(case.lengths)
    return {
        "pool": pool,
        "slot_indices": slots,
        "num_accepted": accepted,
        "draft": (lengths - 1).clamp_min(0),
    }
