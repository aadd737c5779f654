"""The pattern of a narrower format in a float32 state: found beside non-finite entries, not made of them."""

from __future__ import annotations

import torch
from gdncheck.compare.checks.low_bits import low_bits_zero


def state(seed=0):
    return torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(seed))


def test_a_state_of_nan_or_infinity_is_taken_for_a_rounded_one():
    for value in (float("nan"), float("inf"), -float("inf")):
        assert not low_bits_zero(torch.full((1, 2, 16, 16), value), 16).any()
        some = state()
        some[0, 0, :, 3] = value
        assert not low_bits_zero(some, 16).any()


def test_a_rounded_head_is_missed_beside_a_non_finite_entry():
    rounded = state()
    rounded[0, 1] = rounded[0, 1].bfloat16().float()
    rounded[0, 1, 2, 5] = float("nan")
    assert low_bits_zero(rounded, 16).tolist() == [[False, True]]


def test_too_few_finite_entries_say_something():
    few = torch.full((1, 1, 16, 16), float("nan"))
    few[0, 0, 0] = 1.5
    assert not low_bits_zero(few, 16).any()
    assert low_bits_zero(few, 16, enough=16).all()
