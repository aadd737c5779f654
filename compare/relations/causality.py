"""Causality: later tokens never reach earlier outputs.

Statement. If tokens from P_n on of every sequence n are changed, the outputs before P_n keep their bits.
"""

from __future__ import annotations

import torch

from ..inputs import Inputs
from .expectation import Expectation, no_rows, same_rows
from .perturb import generator, replace_tokens

NAME = "causality"


def plan(inputs: Inputs, *, seed: int) -> list[Expectation]:
    """One call, cut inside a chunk in every sequence of two tokens or more."""
    cu = inputs.cu_seqlens.cpu()
    lengths = cu[1:] - cu[:-1]
    dice = generator(seed, 101)
    share = torch.rand(len(lengths), generator=dice) * 0.6 + 0.2
    cut = (lengths * share).long().clamp(min=1)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    token = torch.arange(inputs.n_tokens) - cu[:-1][sequence]
    later = token >= cut[sequence]
    if not bool(later.any()):
        return []
    rows, kept = later.nonzero().flatten().to(inputs.device), (~later).nonzero().flatten().to(inputs.device)
    cuts = ", ".join(str(int(c)) for c, n in zip(cut, lengths, strict=True) if n > 1)
    short = cuts if len(cuts) < 40 else cuts[:37] + "..."
    return [
        Expectation(
            relation=NAME,
            inputs=replace_tokens(inputs, rows, seed=seed, salt=102),
            what=f"tokens from {short} on",
            output_rows=same_rows(kept),
            state_rows=no_rows(inputs.device),
            changed_rows=rows,
        )
    ]
