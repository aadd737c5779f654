"""Call order: what a process has computed before changes nothing.

Statement. After a call with other values in the same shapes, and one in another shape, the case gives the
same bits as in its first call.
Exercised by the calls in between.
Fires on: something kept between calls (a cache keyed by less than it depends on, a buffer not reset).
Silent on: kernels that keep nothing that shows.
"""

from __future__ import annotations

import torch

from ..inputs import Inputs, take_sequences
from .expectation import Expectation, Plan, same_rows
from .perturb import replace_states, replace_tokens

NAME = "call-order"


def plan(inputs: Inputs, *, seed: int) -> Plan:
    """Other values, then fewer sequences (or fewer tokens of the only one), then the case."""
    if inputs.n_tokens == 0:
        return "the case has no tokens"
    rows = torch.arange(inputs.n_tokens, device=inputs.device)
    sequences = torch.arange(inputs.n_sequences, device=inputs.device)
    other = replace_states(replace_tokens(inputs, rows, seed=seed, salt=321), sequences, seed=seed, salt=322)
    lengths = inputs.cu_seqlens.cpu().diff()
    number = int(lengths.argmax())
    shorter = take_sequences(other, [number], tokens=[max(1, int(lengths[number]) // 2)])
    return [
        Expectation(
            relation=NAME,
            inputs=inputs,
            what="nothing but two other calls",
            verb="before it",
            before=(other, shorter),
            output_rows=same_rows(rows),
            state_rows=same_rows(sequences),
            exercised=2,
        )
    ]
