"""Power-of-two scaling: the rule is linear in v and the initial state, and a power of two costs no bit.

Statement. v and S_0 times 2^k give output and final state times 2^k, bit for bit while nothing over- or
underflows.
Exercised by the rows that differ from the first call's.
Fires on: a constant where there should be none (a floor or clamp, an absolute eps, a NaN guard).
Silent on: subnormal numbers that lose bits at one of the two scales, where bits are not promised.
"""

from __future__ import annotations

import msgspec
import torch

from ..inputs import Inputs
from .expectation import Expectation, Plan, same_rows
from .perturb import HEADROOM

NAME = "power-of-two-scaling"
EXPONENT = 2


def plan(inputs: Inputs, *, seed: int) -> Plan:
    """One call with v and the states four times as large (a quarter where that would be too large)."""
    del seed
    state = inputs.initial_state
    tensors = [inputs.v] if state is None else [inputs.v, state]
    fits = all(
        float(x.abs().max()) * 2.0**EXPONENT < float(torch.finfo(x.dtype).max) * HEADROOM
        for x in tensors
        if x.numel()
    )
    if not fits and inputs.v.dtype == torch.float16:
        return "v is too large to grow and too narrow to shrink"
    factor = 2.0 ** (EXPONENT if fits else -EXPONENT)
    changed = msgspec.structs.replace(
        inputs, v=inputs.v * factor, initial_state=None if state is None else state * factor
    )
    rows = torch.arange(inputs.n_tokens, device=inputs.device)
    return [
        Expectation(
            relation=NAME,
            inputs=changed,
            what=f"v and the initial states times {factor:g}",
            verb="given",
            output_rows=same_rows(rows),
            state_rows=same_rows(torch.arange(inputs.n_sequences, device=inputs.device)),
            factor=factor,
            changed_rows=rows,
            lenient=True,
        )
    ]
