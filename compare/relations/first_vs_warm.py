"""First against warm: the first call of a process gives what its later calls give.

Statement. Compiling, tuning and filling caches change no bit of what is returned.
Exercised by a process that made the first call of its life on this case, and then the same again.
Fires on: a first call that differs beyond rounding, or at all where bits are promised (a tuner that runs the
kernel on the caller's buffers, a cache filled too late).
Silent on: kernels that are the same throughout.
"""

from __future__ import annotations

import torch

from ..inputs import Inputs
from .expectation import Expectation, Plan, same_rows

NAME = "first-vs-warm"


def plan(inputs: Inputs, *, seed: int) -> Plan:
    """The case twice in a new process."""
    del seed
    return [
        Expectation(
            relation=NAME,
            inputs=inputs,
            what="nothing: the second call of a new process against its first",
            output_rows=same_rows(torch.arange(inputs.n_tokens, device=inputs.device)),
            state_rows=same_rows(torch.arange(inputs.n_sequences, device=inputs.device)),
            process="pair",
        )
    ]
