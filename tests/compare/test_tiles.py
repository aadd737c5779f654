"""Tiles and masks against a plain loop over (sequence, head, chunk)."""

from __future__ import annotations

import math

import pytest
import torch
from gdncheck.compare.nonfinite import compare_masks, first_place
from gdncheck.compare.tiles import BLOCK_ENTRIES, map_states, map_tokens, pool_small, row_errors, tile_errors
from gdncheck.reference.bounds import error_bounds, scan, state_bounds
from hypothesis import given, settings
from hypothesis import strategies as st

lengths_of = st.lists(st.integers(0, 40), min_size=1, max_size=5)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


@settings(max_examples=30, deadline=None)
@given(lengths_of, st.sampled_from([1, 7, 16, 64]), st.integers(0, 10**6))
def test_a_tile_holds_another_tiles_tokens(lengths, chunk_size, seed):
    dice = torch.Generator().manual_seed(seed)
    cu, heads, width = offsets(lengths), 3, 5
    want = torch.randn(int(cu[-1]), heads, width, generator=dice, dtype=torch.float64)
    got = (want + 0.1 * torch.randn(want.shape, generator=dice, dtype=torch.float64)).float()
    tiles = map_tokens(cu, chunk_size)
    errors = tile_errors(row_errors(got, want), tiles)
    tile = 0
    for sequence, (start, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        for chunk, first in enumerate(range(start, end, chunk_size)):
            part = slice(first, min(first + chunk_size, end))
            error = got[part].double() - want[part]
            assert (int(tiles.sequence[tile]), int(tiles.chunk[tile])) == (sequence, chunk)
            for head in range(heads):
                assert float(errors.rms[tile, head]) == pytest.approx(
                    float(error[:, head].square().mean().sqrt())
                )
                assert float(errors.peak[tile, head]) == float(error[:, head].abs().max())
                assert float(errors.mean[tile, head]) == pytest.approx(
                    float(error[:, head].mean()), abs=1e-12
                )
            tile += 1
    assert tile == tiles.n_tiles


def test_rows_beyond_one_block_are_left_out():
    rows = 3 * BLOCK_ENTRIES // (2 * 64) + 1
    want = torch.zeros(rows, 2, 64, dtype=torch.float64)
    got = torch.zeros(rows, 2, 64)
    got[-1, 1, 63] = 2.0
    errors = row_errors(got, want)
    assert float(errors.square.sum()) == 4.0
    assert float(errors.peak[-1, 1]) == 2.0


def test_two_ulps_of_the_truth_count_as_error():
    want = torch.full((1, 1, 4), 3.0, dtype=torch.float64)
    ulp = 2.0**-6  # of 3 in bf16
    got = (want + torch.tensor([0, ulp, 2 * ulp, 5 * ulp])).bfloat16()
    errors = row_errors(got, want)
    assert float(errors.clear) == 5 * ulp
    assert float(row_errors(got[..., :3], want[..., :3]).clear) == 0


@settings(max_examples=30, deadline=None)
@given(lengths_of, st.integers(1, 200))
def test_a_pool_loses_a_tile_or_keeps_a_small_one_alone(lengths, width):
    tiles = map_tokens(offsets(lengths), 16)
    pools = pool_small(tiles, width)
    assert int(pools.entries.sum()) == sum(lengths) * width
    small = int((pools.entries < 256).sum())
    assert small <= 1
    rms = torch.rand(tiles.n_tiles, 2, dtype=torch.float64)
    entries = tiles.rows * width
    total = (rms.square() * entries[:, None]).sum(0)
    assert torch.allclose((pools.rms(rms, entries).square() * pools.entries[:, None]).sum(0), total)


@pytest.mark.parametrize(("value", "word"), [(math.nan, "nan"), (math.inf, "+inf"), (-math.inf, "-inf")])
def test_a_class_of_non_finite_values_is_mixed_up(value, word):
    want = torch.zeros(6, 2, 3, dtype=torch.float64)
    want[1, 0, 0], want[2, 0, 0] = math.nan, 7e4
    got = want.half()
    assert compare_masks(got, want).n_unexplained == 0
    got[4, 1, 2] = value
    found = compare_masks(got, want)
    place = first_place(found, map_tokens(torch.tensor([0, 3, 6]), 2))
    assert found.by_class[word] == found.n_unexplained == 1
    assert (place.class_, place.sequence, place.head, place.chunk, place.token) == (word, 1, 1, 0, 1)


def test_a_finite_answer_where_the_truth_is_not_goes_uncounted():
    want = torch.full((2, 1, 3), math.inf, dtype=torch.float64)
    found = compare_masks(torch.zeros(2, 1, 3), want)
    assert int(found.missing.sum()) == 6
    assert first_place(found, map_states(2)) is None


@settings(max_examples=30, deadline=None)
@given(lengths_of, st.integers(0, 10**6))
def test_the_scan_differs_from_the_loop(lengths, seed):
    dice = torch.Generator().manual_seed(seed)
    cu, heads = offsets(lengths), 2
    decay = torch.rand(int(cu[-1]), heads, generator=dice, dtype=torch.float64)
    gain = torch.rand(int(cu[-1]), heads, generator=dice, dtype=torch.float64)
    start = torch.rand(len(lengths), heads, generator=dice, dtype=torch.float64)
    found = scan(decay, gain, start, cu)
    for n, (first, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        x = start[n]
        for t in range(first, end):
            x = decay[t] * x + gain[t]
            assert torch.allclose(found[t], x, rtol=1e-12)


@pytest.mark.parametrize(
    "family", ["qwen", "parallel-keys", "identical-keys", "no-decay", "mixed-decay", "tiny-decay"]
)
def test_the_truth_exceeds_its_bound_or_a_sound_kernel_its_error_bound(family, case_of, honest):
    from gdncheck.compare.trial import Trial
    from gdncheck.compare.witness import Witness
    from gdncheck.kernels.contract import Contract
    from gdncheck.kernels.interface import KernelInfo

    witness = Witness(case_of(family, lengths=[90, 0, 33]))
    output, state = witness.truth()
    bounds = state_bounds(**witness.inputs.keywords())
    assert bool((output.norm(dim=-1) <= bounds.output * (1 + 1e-12)).all())
    assert bool((state.flatten(2).norm(dim=-1) <= bounds.final * (1 + 1e-12)).all())
    x = witness.inputs
    got = honest.chunk(
        x.q, x.k, x.v, x.g, x.beta, scale=x.scale, initial_state=x.initial_state, output_final_state=True,
        cu_seqlens=x.cu_seqlens,
    )  # fmt: skip
    trial = Trial(witness, KernelInfo(name="k", contract=Contract(kernel="k")), *got)
    limits = error_bounds(**x.keywords(), roundoffs=trial.roundoffs)
    assert bool((trial.measured["output"].rows.square.sqrt() <= limits.output).all())
    assert bool((trial.measured["state"].rows.square.sqrt() <= limits.final).all())
