"""The running bound on error: what a sound float32 kernel may not exceed, whatever its gates."""

from __future__ import annotations

import pytest
import torch
from gdncheck.reference.bounds import Roundoffs, error_bounds
from gdncheck.reference.emulation import emulate_chunk
from gdncheck.reference.truth import truth

SINGLE = 2.0**-24


@pytest.mark.parametrize("largest", [1.0, 300.0, 3e3, 6e4])
def test_a_float32_chunk_kernel_exceeds_its_bound_where_huge_gates_meet_small_ones(largest):
    """exp(g) is 0 for every g below -745, but a float32 sum of gates has lost digits all the same."""
    for seed in range(10):
        dice = torch.Generator().manual_seed(seed)
        q, k = (
            torch.nn.functional.normalize(torch.randn(104, 2, 16, generator=dice), dim=-1) for _ in range(2)
        )
        v = torch.randn(104, 2, 16, generator=dice)
        huge = torch.rand(104, 2, generator=dice) < 0.5
        size = torch.rand(104, 2, generator=dice)
        call = {
            "q": q, "k": k, "v": v, "g": -torch.where(huge, largest * size, 0.02 * size),
            "beta": torch.rand(104, 2, generator=dice), "cu_seqlens": torch.tensor([0, 70, 71, 104]),
        }  # fmt: skip
        output, state = truth(**call)
        got = emulate_chunk(**call, precision="generic")
        bounds = error_bounds(
            **call, scale=16**-0.5, initial_state=None, roundoffs=Roundoffs(SINGLE, SINGLE, SINGLE, SINGLE)
        )
        assert bool(((got.output.double() - output).norm(dim=-1) <= bounds.output).all())
        assert bool(((got.final_state.double() - state).flatten(2).norm(dim=-1) <= bounds.final).all())
