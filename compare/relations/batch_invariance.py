"""Batch invariance: a sequence's result does not depend on who shares the call.

Statement. A sequence alone gives what it gave in company; one that was alone gives the same as the last of
three copies of itself.
Exercised by the tokens of the neighbours that came or went.
Fires on: a difference beyond rounding, or any where bits are promised (one path, nothing tuned).
Silent on: another block size or split for another batch, where bits are not promised.
"""

from __future__ import annotations

import msgspec
import torch

from ..inputs import Inputs, take_sequences
from .expectation import Expectation, Plan

NAME = "batch-invariance"
COPIES = 3


def plan(inputs: Inputs, *, seed: int) -> Plan:
    """The longest and the shortest sequence with tokens, each alone; or three copies of the only one."""
    del seed
    lengths = inputs.cu_seqlens.cpu().diff()
    filled = lengths.nonzero().flatten()
    if len(filled) == 0:
        return "no sequence has tokens"
    if inputs.n_sequences == 1:
        return [_copies(inputs)]
    order = filled[torch.argsort(lengths[filled], stable=True)]
    chosen = sorted({int(order[0]), int(order[-1])})
    return [_alone(inputs, number, int(lengths.sum() - lengths[number])) for number in chosen]


def _alone(inputs: Inputs, number: int, others: int) -> Expectation:
    start, end = (int(inputs.cu_seqlens[number + i]) for i in (0, 1))
    rows = torch.arange(start, end, device=inputs.device)
    one = torch.tensor([number], device=inputs.device)
    return Expectation(
        relation=NAME,
        inputs=take_sequences(inputs, [number]),
        what=f"sequence {number}",
        verb="alone in the call",
        output_rows=(rows, rows - start),
        state_rows=(one, torch.zeros_like(one)),
        # Its neighbours may all have been empty: then nothing was tested.
        exercised=others,
        same_shape=False,
    )


def _copies(inputs: Inputs) -> Expectation:
    tokens = inputs.n_tokens
    state = inputs.initial_state
    packed = msgspec.structs.replace(
        inputs,
        **{name: torch.cat([getattr(inputs, name)] * COPIES) for name in ("q", "k", "v", "g", "beta")},
        cu_seqlens=torch.arange(COPIES + 1, device=inputs.device) * tokens,
        initial_state=None if state is None else torch.cat([state] * COPIES),
    )
    rows = torch.arange(tokens, device=inputs.device)
    zero = torch.zeros(1, dtype=torch.int64, device=inputs.device)
    return Expectation(
        relation=NAME,
        inputs=packed,
        what="the sequence",
        verb=f"packed {COPIES} times",
        output_rows=(rows, rows + tokens * (COPIES - 1)),
        state_rows=(zero, zero + COPIES - 1),
        exercised=tokens * (COPIES - 1),
        same_shape=False,
    )
