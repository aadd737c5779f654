"""The pool of a call in a kernel's layout: every state goes to its row and comes back as it went."""

from __future__ import annotations

import pytest
import torch
from gdncheck.capture.errors import Refused
from gdncheck.kernels.slots import SlotView
from hypothesis import given, settings
from hypothesis import strategies as st

K, V, HV = 3, 5, 2


def call(n_sequences=3, **more):
    tensors = {
        "k": torch.zeros(n_sequences, 1, K),
        "v": torch.zeros(n_sequences, HV, V),
        "cu_seqlens": torch.arange(n_sequences + 1),
    }
    return {**tensors, **more}


def states(n, seed=0):
    return torch.randn(n, HV, K, V, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(
    layout=st.sampled_from(["KV", "VK"]),
    null=st.booleans(),
    slots=st.permutations(range(5)),
    fresh=st.lists(st.booleans(), min_size=3, max_size=3),
    seed=st.integers(0, 99),
)
def test_pool_goes_in_and_comes_back_unchanged_except_fresh_rows(layout, null, slots, fresh, seed):
    pool = states(5, seed)
    given_pool = pool.clone()
    slots = torch.tensor(slots[:3])
    tensors = call(pool=pool, slot_indices=slots, has_initial_state=~torch.tensor(fresh))
    view = SlotView(tensors, layout=layout, state_dtype=None, null_slot=null)
    shape = (K, V) if layout == "KV" else (V, K)
    assert view.pool.shape == (5 + null, HV, *shape)
    wanted = pool.clone()
    wanted[slots[torch.tensor(fresh)]] = 0
    assert torch.equal(view.outputs()["pool"], wanted)
    assert torch.equal(view.outputs()["final_state"], wanted[slots])
    for sequence, index in enumerate(view.indices().tolist()):
        row = view.pool[index]
        row = row.transpose(-1, -2) if layout == "VK" else row
        assert torch.equal(row, wanted[slots[sequence]]), "the kernel's index leads to another sequence's row"
    view.pool.fill_(7.0)
    assert torch.equal(pool, given_pool), "the caller's pool was written"


@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_states_without_a_pool_get_a_row_each(layout):
    state = states(3)
    view = SlotView(call(initial_state=state), layout=layout, state_dtype=None)
    assert "pool" not in view.outputs()
    assert torch.equal(view.outputs()["final_state"], state)
    doubled = view.gathered() * 2
    assert torch.equal(view.outputs()["final_state"], state), "gathering must copy"
    view.scatter(doubled)
    assert torch.equal(view.outputs()["final_state"], state * 2)


def test_no_state_is_zeros():
    view = SlotView(call(), layout="VK", state_dtype=None)
    assert view.pool.dtype == torch.float32
    assert not view.outputs()["final_state"].any()


def test_state_dtype_rounds_going_in_and_at_the_scatter():
    state = states(3)
    view = SlotView(call(initial_state=state), layout="VK", state_dtype="bfloat16")
    assert torch.equal(view.outputs()["final_state"], state.to(torch.bfloat16))
    view.scatter(state.transpose(-1, -2) * 3)
    assert torch.equal(view.outputs()["final_state"], (state * 3).to(torch.bfloat16))


def test_null_slot_takes_the_padding_and_owns_no_row():
    pool = states(4)
    tensors = call(pool=pool, slot_indices=torch.tensor([2, -1, 0]))
    view = SlotView(tensors, layout="VK", state_dtype=None, null_slot=True)
    assert view.indices().tolist() == [3, 0, 1]
    assert not view.pool[0].any()
    assert not view.outputs()["final_state"][1].any()
    plain = SlotView(tensors, layout="VK", state_dtype=None)
    assert plain.indices().tolist() == [2, -1, 0], "a kernel that knows -1 must be told -1"
    with pytest.raises(Refused, match="padded decode row"):
        plain.gathered()


def test_every_token_of_a_sequence_has_the_sequences_slot():
    view = SlotView(call(), layout="VK", state_dtype=None, null_slot=True)
    columns = view.columns(4)
    assert columns.tolist() == [[1] * 4, [2] * 4, [3] * 4]
    assert columns.is_contiguous(), "a kernel walks it by strides of its own"


def test_index_beyond_the_pool_is_refused_before_the_kernel_reads_it():
    with pytest.raises(Refused, match="reach 9 but the pool has 4"):
        SlotView(call(pool=states(4), slot_indices=torch.tensor([0, 9, 1])), layout="VK", state_dtype=None)
