"""Across processes: the same call in another process gives the same bits.

Statement. Nothing but the call's inputs decides the result: no tuner's pick, no address, no environment that
differs between two processes on one machine.
Exercised by the processes that answered.
Fires on: a difference beyond rounding, or any where bits are promised.
Silent on: another tuner's pick, where bits are not promised.
"""

from __future__ import annotations

import torch

from ..inputs import Inputs
from .expectation import Expectation, Plan, same_rows

NAME = "across-processes"


def plan(inputs: Inputs, *, seed: int) -> Plan:
    """The case, in a process of its own."""
    del seed
    return [
        Expectation(
            relation=NAME,
            inputs=inputs,
            what="nothing but the process",
            output_rows=same_rows(torch.arange(inputs.n_tokens, device=inputs.device)),
            state_rows=same_rows(torch.arange(inputs.n_sequences, device=inputs.device)),
            process="fresh",
        )
    ]
