"""Head permutation: heads do not touch each other, and their number says nothing about their place.

Statement. If key heads, and the value heads of each, change places, results change places with them.
Exercised by the rows that differ from the first call's at the same place.
Fires on: a head whose result depends on its place (wrong head mapping, a stride, a neighbour's gate).
Silent on: rounding that depends on the place, where the contract does not promise bits.
"""

from __future__ import annotations

import msgspec
import torch

from ..inputs import Inputs
from .expectation import Expectation, Plan, same_rows
from .perturb import generator

NAME = "head-permutation"


def plan(inputs: Inputs, *, seed: int) -> Plan:
    """One call with key heads and the value heads inside each in another order."""
    n_key, n_value = inputs.q.shape[1], inputs.heads
    if n_value < 2:
        return "the case has one head"
    dice = generator(seed, 301)
    key = _moved(n_key, dice)
    inner = _moved(n_value // n_key, dice)
    value = (key[:, None] * (n_value // n_key) + inner[None, :]).flatten()
    key, value = key.to(inputs.device), value.to(inputs.device)
    state = inputs.initial_state
    changed = msgspec.structs.replace(
        inputs,
        q=inputs.q[:, key],
        k=inputs.k[:, key],
        v=inputs.v[:, value],
        g=inputs.g[:, value],
        beta=inputs.beta[:, value],
        initial_state=None if state is None else state[:, value],
    )
    rows = torch.arange(inputs.n_tokens, device=inputs.device)
    return [
        Expectation(
            relation=NAME,
            inputs=changed,
            what="heads",
            verb="in another order",
            output_rows=same_rows(rows),
            state_rows=same_rows(torch.arange(inputs.n_sequences, device=inputs.device)),
            heads=torch.argsort(value),
            changed_rows=rows,
            lenient=True,
        )
    ]


def _moved(n: int, dice: torch.Generator) -> torch.Tensor:
    """A random order of n in which something moves (n > 1)."""
    order = torch.randperm(n, generator=dice)
    return order.roll(1) if n > 1 and bool((order == torch.arange(n)).all()) else order
