"""Every way in which Python code gets fresh memory is poisoned and guarded when asked, else left alone."""

from __future__ import annotations

import pytest
import torch
from gdncheck.kernels import allocation
from gdncheck.kernels.guard import BAND, Guards
from gdncheck.kernels.poison import HUGE, Poison

X = torch.ones(3, 4)
WAYS = {
    "empty": lambda dtype: torch.empty(3, 4, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(X, dtype=dtype),
    "empty_strided": lambda dtype: torch.empty_strided((3, 4), (4, 1), dtype=dtype),
    "empty_permuted": lambda dtype: torch.empty_permuted((3, 4), (1, 0), dtype=dtype),
    "new_empty": lambda dtype: X.new_empty(3, 4, dtype=dtype),
    "new_empty_strided": lambda dtype: X.new_empty_strided((3, 4), (4, 1), dtype=dtype),
}


@pytest.fixture(autouse=True)
def wrapped():
    allocation.install()
    yield
    allocation.uninstall()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_way_to_allocate_is_not_poisoned(way, dtype):
    for kind in ("nan", "huge"):
        poison = Poison(kind)
        with allocation.fresh_buffers([poison]):
            fresh = WAYS[way](dtype)
        assert fresh.shape == (3, 4)
        if kind == "nan":
            assert fresh.isnan().all()
        else:
            assert fresh.isfinite().all()
            assert (fresh.float() >= min(HUGE, torch.finfo(dtype).max) * 0.99).all()
        n_bytes = 12 * fresh.element_size()
        assert poison.evidence() == {"poison": kind, "poisoned_buffers": 1, "poisoned_bytes": n_bytes}


def test_filled_memory_or_a_callers_buffer_is_poisoned():
    poison = Poison("nan")
    mine = torch.zeros(3)
    with allocation.fresh_buffers([poison]):
        assert not torch.zeros(3).isnan().any()
        torch.empty(3, out=mine)
        torch.empty(0)
        torch.empty(3, device="meta")
    assert not mine.isnan().any()
    assert poison.buffers == 0


def test_integers_and_bools_keep_what_they_held():
    with allocation.fresh_buffers([Poison("nan")]):
        assert (torch.empty(4, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
        assert torch.empty(4, dtype=torch.bool).all()


def test_memory_stays_poisoned_after_the_call():
    with pytest.raises(KeyError), allocation.fresh_buffers([Poison("nan")]):
        raise KeyError
    poison = Poison("nan")
    assert WAYS["empty"](torch.float32) is not None
    assert poison.buffers == 0
    original = torch.empty.__gdncheck_original__
    allocation.uninstall()
    assert torch.empty is original


def test_a_buffer_that_is_not_contiguous_counts_as_guarded():
    guards = Guards()
    with allocation.fresh_buffers([guards]):
        fresh = WAYS["empty_permuted"](torch.float32)
    assert fresh.stride() == (1, 3)
    assert guards.evidence()["guarded_buffers"] == 0


@pytest.mark.parametrize("way", [way for way in WAYS if way != "empty_permuted"])
def test_a_write_past_either_end_goes_unseen(way):
    guards = Guards()
    with allocation.fresh_buffers([guards, Poison("huge")]):
        fresh = WAYS[way](torch.float32)
    assert guards.evidence() == {"guarded_buffers": 1, "guard_written": []}
    assert (fresh == HUGE).all(), "poison is not inside the guards"
    past = torch.as_strided(fresh, (1,), (1,), fresh.storage_offset() + 12 + 4)
    assert past.isnan().all(), "a read past the end gets a number"
    past.zero_()
    torch.as_strided(fresh, (1,), (1,), fresh.storage_offset() - 2).zero_()
    hits = {(hit["side"], hit["bytes"]) for hit in guards.evidence()["guard_written"]}
    assert hits == {("before", 8), ("after", 20)}


@pytest.mark.parametrize("shape", [(0,), (), (3, 0, 2), (5, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
def test_a_guarded_input_is_not_the_tensor(shape, dtype):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    guards = Guards()
    copy = guards.guarded("input q", tensor)
    assert copy.dtype == dtype
    assert torch.equal(copy, tensor)
    assert copy.storage_offset() * copy.element_size() == BAND
    assert guards.evidence()["guard_written"] == []
