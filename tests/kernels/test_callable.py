"""A function by import path gets the rule in its own layout, and its result back in the canonical one."""

from __future__ import annotations

import pytest
import torch
from gdncheck.capture.errors import BadInput, Refused
from gdncheck.kernels.callable import CallableAdapter, read_capabilities
from gdncheck.kernels.contract import Capabilities
from gdncheck.kernels.interface import KernelCall, RunOptions

N, T, HK, HV, K, V = 3, 9, 2, 4, 5, 3


def tensors(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)
    return {
        "q": (torch.randn(T, HK, K, generator=generator) * 4).to(dtype),
        "k": (torch.randn(T, HK, K, generator=generator) * 4).to(dtype),
        "v": torch.randn(T, HV, V, generator=generator).to(dtype),
        "g": -torch.rand(T, HV, generator=generator),
        "beta": torch.rand(T, HV, generator=generator),
        "cu_seqlens": torch.tensor([0, 2, 2, 9]),
        "initial_state": torch.randn(N, HV, K, V, generator=generator),
    }


class Recorder:
    """A function that keeps what it was given and returns v and a state of its own layout."""

    def __init__(self, state=None):
        self.calls = []
        self.state = state

    def __call__(self, q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
        self.calls.append(dict(q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=initial_state,
                               output_final_state=output_final_state, cu_seqlens=cu_seqlens))  # fmt: skip
        if self.state is not None:
            return v, self.state
        state = initial_state
        return v, torch.zeros(len(cu_seqlens) - 1, HV, K, V) if state is None else state


def run(function, given=None, capabilities=None, **options):
    adapter = CallableAdapter("m:f", function, read_capabilities(capabilities, "m:f"))
    return adapter.run(KernelCall(tensors=given or tensors(), options=RunOptions(**options)))


def test_raw_keys_reach_the_function_unnormalised_or_unrounded():
    seen = Recorder()
    run(seen, qk="raw")
    given = tensors()
    for name in ("q", "k"):
        wide = given[name].double()
        expected = wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) + 1e-6)
        assert seen.calls[0][name].dtype == torch.bfloat16
        assert torch.allclose(seen.calls[0][name].double(), expected, rtol=2**-8, atol=0)
        assert seen.calls[0][name].shape == (T, HK, K), "heads are expanded"


def test_normalised_keys_are_normalised_again():
    seen = Recorder()
    run(seen)
    assert torch.equal(seen.calls[0]["k"], tensors()["k"])


def test_scale_is_not_given_or_not_the_default():
    seen = Recorder()
    run(seen)
    run(seen, scale=0.25)
    assert [c["scale"] for c in seen.calls] == [pytest.approx(K**-0.5), 0.25]


def test_each_declared_difference_is_converted_there_and_back():
    seen = Recorder()
    given = tensors()
    outputs = run(seen, given, {"state_layout": "VK", "gate_space": "linear", "gva": False})
    got = seen.calls[0]
    assert torch.equal(got["initial_state"], given["initial_state"].transpose(-1, -2))
    assert torch.equal(got["g"], given["g"].exp())
    # value head h reads key head h // (HV / HK)
    assert torch.equal(got["k"], given["k"][:, [0, 0, 1, 1]])
    assert torch.equal(outputs["final_state"], given["initial_state"])


def test_a_function_for_one_sequence_is_given_several():
    seen = Recorder()
    given = tensors()
    outputs = run(seen, given, {"varlen": False})
    assert [c["cu_seqlens"].tolist() for c in seen.calls] == [[0, 2], [0, 0], [0, 7]]
    assert torch.equal(seen.calls[2]["k"], given["k"][2:])
    assert torch.equal(outputs["output"], given["v"])
    assert torch.equal(outputs["final_state"], given["initial_state"])


def test_a_fresh_sequence_starts_from_its_stale_state():
    seen = Recorder()
    given = tensors()
    given["initial_state"][1] = float("nan")
    given["has_initial_state"] = torch.tensor([True, False, True])
    run(seen, given)
    state = seen.calls[0]["initial_state"]
    assert torch.equal(state[1], torch.zeros(HV, K, V))
    assert torch.equal(state[0], given["initial_state"][0])


def test_slots_are_not_gathered_for_a_function_that_takes_states():
    seen = Recorder()
    given = tensors()
    pool = torch.randn(6, HV, K, V)
    del given["initial_state"]
    given |= {"pool": pool, "slot_indices": torch.tensor([4, -1, 0])}
    run(seen, given)
    state = seen.calls[0]["initial_state"]
    assert torch.equal(state[[0, 2]], pool[[4, 0]])
    assert not state[1].any(), "a padding index read a slot"


def test_slots_are_kept_from_a_function_that_names_them():
    seen = {}

    def f(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, pool, slot_indices):
        seen.update(pool=pool, slots=slot_indices, state=initial_state)
        pool[slot_indices] = 7
        return v, None

    given = tensors()
    del given["initial_state"]
    given |= {"pool": torch.zeros(4, HV, K, V), "slot_indices": torch.tensor([3, 1, 0])}
    outputs = run(f, given, {"state_layout": "VK"})
    assert seen["state"] is None
    assert seen["pool"].shape == (4, HV, V, K)
    assert outputs["pool"].shape == (4, HV, K, V)
    assert (outputs["pool"][[0, 1, 3]] == 7).all()
    assert not outputs["pool"][2].any()


def test_a_captured_state_reaches_a_float32_function_in_another_dtype():
    seen = Recorder()
    given = tensors()
    given["initial_state"] = given["initial_state"].bfloat16()
    run(seen, given)
    run(seen, given, {"state_dtypes": ["float32", "bfloat16"]})
    assert [c["initial_state"].dtype for c in seen.calls] == [torch.float32, torch.bfloat16]


def keyword_function(**defaults):
    seen = {}

    def f(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, chunk_size=64, **rest):
        seen.update(chunk_size=chunk_size, rest=rest)
        return v, initial_state

    return f, seen


def test_other_keywords_reach_a_function_that_does_not_name_them():
    f, seen = keyword_function()
    given = {**tensors(), "has_initial_state": torch.ones(N, dtype=torch.bool)}
    run(f, given, chunk_size=16)
    assert seen == {"chunk_size": 16, "rest": {}}


def needs_pool(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, pool):
    return v, initial_state


REFUSED = [
    (Recorder(), {"chunk_size": 16}, None, "chunk_size"),
    (keyword_function()[0], {"chunk_size": 48}, {"chunk_sizes": [16, 32]}, "not 48"),
    (Recorder(), {"l2norm": "in_kernel", "qk": "raw"}, None, "l2norm"),
    (Recorder(), {"state_dtype": "bfloat16"}, None, "bfloat16"),
    (Recorder(), {}, {"input_dtypes": ["float32"]}, "bfloat16"),
    (Recorder(), {"extra": {"draft": 3}}, None, "draft"),
    (needs_pool, {}, None, "needs pool"),
]


@pytest.mark.parametrize(("function", "options", "capabilities", "word"), REFUSED)
def test_a_call_outside_the_capabilities_is_run(function, options, capabilities, word):
    with pytest.raises(Refused, match=word):
        run(function, None, capabilities, **options)


@pytest.mark.parametrize("wrong", [torch.zeros(N, HV, V, K), torch.zeros(2), torch.zeros(N, HV, K, V).long()])
def test_a_wrong_state_is_kept_from_the_verdict(wrong):
    """A kernel that returns another shape or dtype is judged, not excused as an error of ours."""
    outputs = run(Recorder(wrong))
    assert torch.equal(outputs["final_state"], wrong)
    assert outputs["final_state"].dtype == wrong.dtype
    assert run(Recorder(wrong), None, {"state_layout": "VK"})["final_state"].numel() == wrong.numel()


@pytest.mark.parametrize(
    "function",
    [lambda q, k, v: None, lambda q, k, v, g, beta: None,
     lambda q, k, v, g, beta, *, scale, initial_state, cu_seqlens: None,
     lambda q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, more: None],
)  # fmt: skip
def test_a_function_of_another_signature_is_loaded(function):
    with pytest.raises(BadInput, match="it must take f"):
        CallableAdapter("m:f", function, Capabilities())


@pytest.mark.parametrize(
    ("declared", "words"),
    [({"gva": True, "gav": True, "colour": 1}, "unknown keys colour, gav"), ({"gva": "yes"}, "gva"),
     ({"chunk_sizes": ["a"]}, "chunk_sizes"), ([1], "list"), ({"state_layout": "KVK"}, "state_layout")],
)  # fmt: skip
def test_capabilities_with_a_mistake_are_taken(declared, words):
    with pytest.raises(BadInput, match=words) as raised:
        read_capabilities(declared, "m:f")
    assert "\n" not in str(raised.value)


def test_capabilities_are_read_differently_as_dict_and_struct():
    declared = Capabilities(gva=False, chunk_sizes=(16, 64), state_layout="VK")
    as_dict = {"gva": False, "chunk_sizes": [16, 64], "state_layout": "VK"}
    assert read_capabilities(as_dict, "m:f") == read_capabilities(declared, "m:f") == declared
    assert read_capabilities(None, "m:f") == Capabilities()
