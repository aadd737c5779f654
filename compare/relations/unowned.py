"""Unowned rows: buffers longer than cu_seqlens says hold rows that belong to nobody.

Statement. Rows of NaN behind the last sequence change no bit of the rows before them; what the kernel
leaves in the rows of nobody is told apart, and is a fault only where the contract promises zeros or silence.
Exercised by the rows that were added.
Fires on: an owned row that such a row reaches (a tail read without a mask).
Silent on: kernels that refuse such a call (not applicable).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..inputs import Inputs
from .expectation import Expectation, Plan, same_rows

NAME = "unowned"
EXTRA_ROWS = 5


def plan(inputs: Inputs, *, seed: int) -> Plan:
    """The case with EXTRA_ROWS rows of NaN behind its last token."""
    del seed
    if inputs.n_tokens == 0:
        return "the case has no tokens"

    def longer(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_full((EXTRA_ROWS, *x.shape[1:]), torch.nan)])

    return [
        Expectation(
            relation=NAME,
            inputs=inputs,
            what=f"{EXTRA_ROWS} rows of NaN",
            verb="behind the last sequence",
            tensors={name: longer(getattr(inputs, name)) for name in ("q", "k", "v", "g", "beta")},
            output_rows=same_rows(torch.arange(inputs.n_tokens, device=inputs.device)),
            state_rows=same_rows(torch.arange(inputs.n_sequences, device=inputs.device)),
            exercised=EXTRA_ROWS,
            spare_rows=EXTRA_ROWS,
            same_shape=False,
        )
    ]
