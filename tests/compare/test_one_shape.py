"""Numbered cases in one shape: a kernel that is tuned per shape is tuned once, whatever the number."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def honest_cases():
    sys.path.insert(0, str(BENCH))
    try:
        import honest_cases
    finally:
        sys.path.remove(str(BENCH))
    return honest_cases


def test_a_number_draws_another_shape(honest_cases):
    drawn = [honest_cases.arguments(number, one_shape=True) for number in range(300)]
    for name in ("k_heads", "v_heads", "dims", "beta_dtype", "state_dtype"):
        assert len({str(one[name]) for one in drawn}) == 1, name
    assert {one["dtype"] for one in drawn} == {"bf16", "fp16", "fp32"}


def test_a_case_comes_without_a_state(honest_cases):
    for number in range(40):
        case = honest_cases.case_number(number, one_shape=True)
        assert case.get("initial_state") is not None, number


def test_the_one_shape_changes_what_else_a_number_draws(honest_cases):
    for number in range(50):
        plain, one = (honest_cases.arguments(number, one_shape=on) for on in (False, True))
        for name in ("family", "lengths", "dtype", "seed"):
            assert plain[name] == one[name]
