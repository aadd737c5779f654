"""Layout conversions on data in which a mistake shows: heads that differ, K != V, asymmetric states."""

from __future__ import annotations

import math

import pytest
import torch
from gdncheck.capture.errors import Refused
from gdncheck.kernels import layouts
from hypothesis import given
from hypothesis import strategies as st


def test_value_head_reads_the_key_head_of_its_group_not_its_neighbours():
    x = torch.arange(2 * 3 * 4).view(2, 3, 4).float()
    expanded = layouts.expand_heads(x, 6)
    for head in range(6):
        assert torch.equal(expanded[:, head], x[:, head // 2])
    # The other order, tiling the row of heads, is a different tensor on this data.
    assert not torch.equal(expanded, x.repeat(1, 2, 1))


def test_equal_head_counts_are_left_alone():
    x = torch.randn(5, 2, 3)
    assert layouts.expand_heads(x, 2) is x


@pytest.mark.parametrize("n_value_heads", [1, 3, 5])
def test_uneven_head_counts_are_refused_with_both_numbers(n_value_heads):
    with pytest.raises(Refused, match=f"{n_value_heads} value heads cannot share 2"):
        layouts.expand_heads(torch.randn(5, 2, 3), n_value_heads)


def test_state_layouts_are_transposed_not_reinterpreted():
    state = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5).float()
    turned = layouts.kv_to_vk(state)
    assert turned.shape == (2, 3, 5, 4)
    assert turned.is_contiguous()
    assert turned[1, 2, 4, 3] == state[1, 2, 3, 4]
    assert torch.equal(layouts.vk_to_kv(turned), state)
    square = torch.arange(16.0).view(1, 1, 4, 4)
    assert not torch.equal(layouts.kv_to_vk(square), square)


def test_gate_spaces():
    g = torch.tensor([0.0, -0.5, -80.0, -math.inf])
    decay = layouts.log_to_linear(g)
    assert decay.tolist()[0] == 1.0
    assert decay.tolist()[3] == 0.0
    assert torch.allclose(layouts.linear_to_log(decay)[:3], g[:3], rtol=1e-6)
    assert layouts.linear_to_log(decay)[3] == -math.inf


@given(st.lists(st.floats(-1e4, 0, width=32), min_size=1, max_size=30))
def test_base_two_logarithm_comes_back_with_the_same_bits(values):
    x = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(layouts.log_to_log2(layouts.log2_to_log(x), torch.float32), x)


def test_batch_row_is_added_and_dropped():
    x = torch.randn(4, 3, 2).transpose(0, 1)
    batched = layouts.add_batch(x)
    assert batched.shape == (1, 3, 4, 2)
    assert batched.is_contiguous()
    assert torch.equal(layouts.drop_batch(batched), x)
    with pytest.raises(AssertionError):
        layouts.drop_batch(torch.zeros(2, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_l2norm_is_rounded_to_the_dtype_and_has_eps_inside_the_root(dtype):
    x = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 0] = 0
    x[1, 0] = 1e-3
    wide = x.double()
    wanted = wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    found = layouts.l2norm_rounded(x)
    assert found.dtype == dtype
    ulp = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-22}[dtype]
    assert torch.allclose(found.double(), wanted, rtol=1.01 * ulp, atol=2e-8)
    assert found[0, 0].abs().max() == 0


def test_state_is_gathered_from_its_slot_and_fresh_sequences_start_from_exact_zeros():
    pool = torch.full((4, 2, 3, 5), math.nan)
    pool[2] = torch.randn(2, 3, 5)
    given_tensors = {
        "pool": pool,
        "slot_indices": torch.tensor([2, 0, -1]),
        "has_initial_state": torch.tensor([True, False, False]),
    }
    state = layouts.gathered_state(given_tensors)
    assert torch.equal(state[0], pool[2])
    assert torch.equal(state[1:], torch.zeros(2, 2, 3, 5))
    assert layouts.gathered_state({}) is None


def test_offsets_are_a_tensor_of_their_own():
    cu_seqlens = torch.tensor([0, 3])
    own = layouts.own_offsets(cu_seqlens)
    assert own is not cu_seqlens
    assert own.data_ptr() != cu_seqlens.data_ptr()
    assert torch.equal(own, cu_seqlens)
    assert layouts.own_offsets(cu_seqlens, torch.int32).dtype == torch.int32


@pytest.mark.parametrize(
    ("a", "b", "ratio"),
    [
        (1.0, 0.125, 8.0),
        (0.125, 0.125, 1.0),
        (0.5, 1.0, 0.5),
        (0.3, 0.125, None),
        (0.0, 1.0, None),
        (1.0, 0.0, None),
    ],
)
def test_only_powers_of_two_are_exact_ratios(a, b, ratio):
    assert layouts.power_of_two_ratio(a, b) == ratio
