"""Run to run: the same call gives the same bits.

Statement. Repeating a call on fixed input changes nothing. Promised by every kernel unless its contract
says otherwise: a result that moves is a race, or a read of memory that nothing wrote.
"""

from __future__ import annotations

import torch

from ..inputs import Inputs
from .expectation import Expectation, same_rows

NAME = "run-to-run"
REPEATS = 2


def plan(inputs: Inputs, *, seed: int) -> list[Expectation]:
    """The same call again, REPEATS times; nothing depends on the seed."""
    del seed
    rows = torch.arange(inputs.n_tokens, device=inputs.device)
    sequences = torch.arange(inputs.n_sequences, device=inputs.device)
    return [
        Expectation(
            relation=NAME,
            inputs=inputs,
            what=f"nothing: call {n + 2} of the same input",
            output_rows=same_rows(rows),
            state_rows=same_rows(sequences),
        )
        for n in range(REPEATS)
    ]
