"""The float64 causal conv against torch's own conv1d, and its packing and state."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from gdncheck.reference import conv
from gdncheck.reference.conv import causal_conv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def make_case(lengths, D=6, W=4, seed=0, bias=True, state=True):
    make = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    return {
        "x": normal(sum(lengths), D),
        "weight": normal(D, W),
        "bias": normal(D) if bias else None,
        "conv_state": normal(len(lengths), D, W - 1) if state else None,
        "cu_seqlens": torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()]),
    }


def torch_conv(case, activation="silu"):
    """Each sequence by itself: torch's conv1d over (state, tokens)."""
    D, W = case["weight"].shape
    bounds = case["cu_seqlens"].tolist()
    outputs, states = [], []
    for n, (a, b) in enumerate(itertools.pairwise(bounds)):
        old = torch.zeros(D, W - 1).double() if case["conv_state"] is None else case["conv_state"][n]
        row = torch.cat([old, case["x"][a:b].T], 1)
        if b > a:
            y = F.conv1d(row[None], case["weight"][:, None], case["bias"], groups=D)[0].T
            outputs.append(y if activation is None else F.silu(y))
        states.append(row[:, row.shape[1] - (W - 1) :])
    return torch.cat(outputs) if outputs else case["x"][:0], torch.stack(states)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    W=st.integers(1, 6),
    activation=st.sampled_from(["silu", "swish", None]),
    bias=st.booleans(),
    state=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_packed_sequence_is_not_convolved_as_alone(lengths, W, activation, bias, state, seed):
    case = make_case(lengths, W=W, seed=seed, bias=bias, state=state)
    y, final = causal_conv(**case, activation=activation)
    expected, expected_final = torch_conv(case, activation)
    assert y.dtype == final.dtype == torch.float64
    assert torch.allclose(y, expected, rtol=1e-13, atol=1e-13)
    assert torch.equal(final, expected_final)


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 5, 29, 30])
def test_a_run_cut_in_two_moves_a_bit(cut):
    case = make_case([30])
    whole, final = causal_conv(**case)
    case.pop("cu_seqlens")
    x = case.pop("x")
    first, state = causal_conv(x[:cut], **case)
    second, state = causal_conv(x[cut:], **{**case, "conv_state": state})
    assert torch.equal(torch.cat([first, second]), whole)
    assert torch.equal(state, final)


def test_blocks_change_the_result(monkeypatch):
    case = make_case([30, 1, 7])
    expected = causal_conv(**case)
    monkeypatch.setattr(conv, "BLOCK_ENTRIES", 24)
    for got, want in zip(causal_conv(**case), expected, strict=True):
        assert torch.equal(got, want)


def test_a_later_or_a_foreign_input_is_read():
    case = make_case([12, 12])
    before = causal_conv(**case)[0]
    case["x"][5] = math.nan
    after = causal_conv(**case)[0]
    assert after[5:9].isnan().all()
    keep = [t for t in range(24) if not 5 <= t < 9]
    assert torch.equal(after[keep], before[keep])
    case = make_case([12, 12])
    case["conv_state"][1] = math.nan
    after = causal_conv(**case)[0]
    assert after[12:15].isnan().all()
    assert torch.equal(after[15:], before[15:])
    assert torch.equal(after[:12], before[:12])


def test_no_sequence_and_no_token_fail():
    y, state = causal_conv(torch.zeros(0, 3), torch.ones(3, 4), cu_seqlens=torch.tensor([0]))
    assert y.shape == (0, 3)
    assert state.shape == (0, 3, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "gelu"}, "activation must be"),
        ({"weight": torch.ones(5, 4)}, r"weight \[D, W"),
        ({"bias": torch.ones(5)}, "bias must be"),
        ({"conv_state": torch.ones(1, 6, 4)}, r"N, D, W-1"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "must run from 0 to T"),
    ],
)
def test_arguments_that_do_not_fit_are_not_named(change, message):
    with pytest.raises(ValueError, match=message):
        causal_conv(**{**make_case([4]), **change})
