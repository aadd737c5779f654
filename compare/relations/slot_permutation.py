"""Slot permutation: which slot of the pool holds a sequence's state changes nothing.

Statement. A kernel that addresses a pool gives the same results when the states lie in other slots, and
leaves every slot that nobody owns as it was, NaN or not.
Exercised by the slots that sequences have moved to.
Fires on: a slot read or written by another index than the sequence's own.
Silent on: kernels that take no slots (not applicable).
"""

from __future__ import annotations

import torch

from ...kernels.interface import KernelCall, KernelInfo
from ..inputs import Inputs
from .expectation import Expectation, Plan, same_rows
from .perturb import generator

NAME = "slot-permutation"
# Slot 0 stays free: engines keep it for rows that nobody owns.
FIRST_SLOT = 1
SPARE = 3


def plan(inputs: Inputs, *, seed: int, info: KernelInfo, call: KernelCall) -> Plan:
    """One call with another pool. call: the case's own, for the pool that it may have."""
    if not info.capabilities.slots:
        return "the kernel takes no slots"
    if inputs.n_sequences == 0:
        return "the case has no sequences"
    dice = generator(seed, 341)
    given = call.tensors.get("slot_indices")
    n = inputs.n_sequences
    if given is None:
        slots = FIRST_SLOT + torch.randperm(n + SPARE, generator=dice)[:n]
        padding = torch.zeros(n, dtype=torch.bool)
        dtype = torch.int64
    else:
        before, dtype = given.long().cpu(), given.dtype
        padding = before < 0
        slots = FIRST_SLOT + torch.randperm(n + SPARE, generator=dice)[:n]
        same = (slots == before) & ~padding
        if bool(same.all()):
            slots = slots.roll(1)
        slots = torch.where(padding, before, slots)
    state = inputs.initial_state
    shape = (inputs.heads, inputs.q.shape[-1], inputs.v.shape[-1])
    kept = torch.float32 if state is None else state.dtype
    pool = torch.full((FIRST_SLOT + n + SPARE, *shape), torch.nan, dtype=kept)
    owned = ~padding
    pool[slots[owned]] = (torch.zeros(n, *shape, dtype=kept) if state is None else state.cpu())[owned]
    rows = torch.arange(inputs.n_tokens, device=inputs.device)
    return [
        Expectation(
            relation=NAME,
            inputs=inputs,
            what="states in other slots",
            verb="of a pool of NaN",
            tensors={"pool": pool, "slot_indices": slots.to(dtype)},
            output_rows=same_rows(rows),
            state_rows=same_rows(torch.arange(n, device=inputs.device)),
            exercised=int(owned.sum()) if given is None else int((slots != given.long().cpu()).sum()),
            lenient=True,
        )
    ]
