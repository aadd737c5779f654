"""How many independent roundings make an error, and how limits widen with few of them."""

from __future__ import annotations

import pytest
import torch
from gdncheck.compare.checks.emulation_ratio import widening
from gdncheck.compare.draws import draws_of_rows, draws_of_states, participation


def exact_participation(error):
    s = torch.linalg.svdvals(error)
    return s.square().sum(-1).square() / s.pow(4).sum(-1)


@pytest.mark.parametrize("rank", [1, 2, 5, 32])
def test_the_directions_of_an_error_are_miscounted(rank):
    torch.manual_seed(rank)
    error = torch.randn(3, 4, 64, rank, dtype=torch.float64) @ torch.randn(
        3, 4, rank, 32, dtype=torch.float64
    )
    found, exact = participation(error), exact_participation(error)
    assert bool((found >= exact / 2).all())
    assert bool((found <= exact * 2).all())


def test_the_size_of_an_error_changes_its_directions():
    torch.manual_seed(0)
    error = torch.randn(2, 3, 16, 8, dtype=torch.float64)
    torch.testing.assert_close(participation(error * 1e-30), participation(error))


def test_a_state_without_error_or_with_nan_breaks_the_count():
    error = torch.zeros(1, 2, 8, 8, dtype=torch.float64)
    error[0, 1, 3] = torch.nan
    assert participation(error).tolist() == [[1.0, 1.0]]


def test_a_state_of_one_token_counts_as_its_entries():
    torch.manual_seed(0)
    one = torch.randn(1, 1, 128, 1, dtype=torch.float64) @ torch.randn(1, 1, 1, 32, dtype=torch.float64)
    assert float(draws_of_states(one)) < 2 * (1 + 32)


def test_limits_narrow_with_few_draws_or_stay_wide_with_many():
    draws = torch.tensor([[1.0, 2.0, 3.0, 10.0, 100.0, 1e4]], dtype=torch.float64)
    factors = widening(draws)
    assert factors.shape == draws.shape
    assert bool((factors.diff() <= 0).all())
    assert float(factors[0, -1]) == 1.0
    assert float(factors[0, 0]) > 4.0


def test_a_chunk_of_rows_is_no_more_than_its_rows():
    rows, entries = torch.tensor([1, 64]), torch.tensor([128, 64 * 128])
    assert draws_of_rows(rows, entries).tolist() == [9.0, 64 + 512]
