"""Kernels of decode and verify steps through their adapters, without a GPU, against the float64 truth.

What a wrong adapter would get wrong shows in one of these: the column that is read, the column that each
token's state goes to, slots of others, gate inputs that do not give g and beta back.
"""

from __future__ import annotations

import pytest
import torch
from gdncheck.capture.errors import Refused
from gdncheck.capture.make import make
from gdncheck.kernels.columns import ColumnView
from gdncheck.kernels.gate_inputs import gate_inputs
from gdncheck.kernels.interface import KernelCall, RunOptions
from gdncheck.reference.truth import truth
from hypothesis import given, settings
from hypothesis import strategies as st

slow = pytest.mark.slow
VERIFY = [
    "vllm.verify@0.19.1",
    pytest.param("vllm.verify@0.33.0", marks=slow),
    pytest.param("sglang.verify@0.5.23", marks=slow),
    pytest.param("vllm.decode@0.19.1", marks=slow),
    "vllm.decode@0.33.0",
]
DECODE = [
    pytest.param("vllm.decode@0.19.1", marks=slow),
    "vllm.decode@0.33.0",
    pytest.param("vllm.packed-decode@0.19.1", marks=slow),
    "vllm.packed-decode@0.33.0",
    pytest.param("sglang.decode@0.5.23", marks=slow),
    pytest.param("sglang.packed-decode@0.5.23", marks=slow),
]
LENGTHS, COLUMNS, SLOTS = [3, 1, 4], 4, 16


def case_of(family="gaussian", **more):
    shape = {"lengths": LENGTHS, "k_heads": 1, "v_heads": 2, "dims": (16, 32), "state": "random"}
    return make(family, **{**shape, **more})


def call_of(case, **tensors):
    given = {**case.tensors, **tensors}
    if "pool" in tensors:
        given.pop("initial_state")
    return KernelCall(tensors=given, options=RunOptions(scale=case.options.scale, qk=case.options.qk))


def true(case, sequence, n_tokens):
    """Output and state of the first tokens of one sequence."""
    start = int(case["cu_seqlens"][sequence])
    rows = slice(start, start + n_tokens)
    return truth(
        *(case[name][rows] for name in ("q", "k", "v", "g", "beta")), scale=case.scale,
        initial_state=case["initial_state"][sequence : sequence + 1],
        cu_seqlens=torch.tensor([0, n_tokens]), l2norm=case.options.qk == "raw",
    )  # fmt: skip


def step(case, seed=0):
    """pool, slot_indices, num_accepted of a verify step whose sequences start from the case's states."""
    dice = torch.Generator().manual_seed(seed)
    state = case["initial_state"]
    pool = torch.randn(SLOTS, *state.shape[1:], generator=dice)
    slots = torch.randperm(SLOTS, generator=dice)[: 3 * COLUMNS].view(3, COLUMNS)
    accepted = torch.randint(1, COLUMNS + 1, (3,), generator=dice)
    pool[slots.gather(1, (accepted - 1)[:, None])[:, 0]] = state
    return {"pool": pool, "slot_indices": slots, "num_accepted": accepted}


def run(handle, call):
    result = handle.run([call])[0]
    assert result.status == "ok", f"{result.status}: {result.message}"
    return result.outputs


def close(found, wanted, limit):
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)) < limit


@pytest.mark.parametrize("name", VERIFY)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=slow)])
def test_every_column_holds_the_state_after_its_token_and_others_keep_their_bits(engine, name, seed):
    case, given = case_of(seed=seed), None
    given = step(case, seed)
    outputs = run(engine(name), call_of(case, **given))
    written = set()
    for n, length in enumerate(LENGTHS):
        start = int(case["cu_seqlens"][n])
        for column in range(length):
            output, state = true(case, n, column + 1)
            slot = int(given["slot_indices"][n, column])
            written.add(slot)
            assert close(outputs["pool"][slot], state[0], 1e-5), f"sequence {n}, column {column}"
            assert close(outputs["output"][start + column], output[-1], 0.01)
    kept = [slot for slot in range(SLOTS) if slot not in written]
    assert torch.equal(outputs["pool"][kept], given["pool"][kept])


@pytest.mark.parametrize("name", VERIFY)
def test_exact_case_agrees_in_every_bit_from_the_accepted_column(engine, name):
    case = case_of("exact", seed=5)
    outputs = run(engine(name), call_of(case, **step(case, 3)))
    for n, length in enumerate(LENGTHS):
        output, state = true(case, n, length)
        start = int(case["cu_seqlens"][n])
        assert torch.equal(outputs["final_state"][n].double(), state[0])
        assert torch.equal(outputs["output"][start : start + length].double(), output)


@pytest.mark.parametrize("name", VERIFY)
def test_padded_row_and_fresh_sequence_leave_the_pool_and_start_from_zeros(engine, name):
    case = case_of(seed=7)
    given = step(case, 4)
    given["slot_indices"][1] = -1
    given["has_initial_state"] = torch.tensor([False, True, True])
    outputs = run(engine(name), call_of(case, **given))
    fresh = case.with_tensors(initial_state=torch.zeros_like(case["initial_state"]))
    assert close(outputs["final_state"][0], true(fresh, 0, LENGTHS[0])[1][0], 1e-5)
    owned = {int(s) for n in (0, 2) for s in given["slot_indices"][n]}
    kept = [slot for slot in range(SLOTS) if slot not in owned]
    assert torch.equal(outputs["pool"][kept], given["pool"][kept])


@pytest.mark.parametrize("name", VERIFY)
def test_call_without_columns_or_with_too_few_is_refused(engine, name):
    case = case_of(seed=1)
    given = step(case)
    for wrong, message in (
        ({"num_accepted": torch.tensor([0, 1, 1])}, "num_accepted"),
        ({"num_accepted": torch.tensor([1, COLUMNS + 1, 1])}, "num_accepted"),
        ({"slot_indices": given["slot_indices"][:, :3]}, "columns"),
        ({"slot_indices": given["slot_indices"] + SLOTS}, "slots"),
    ):
        accepted = {"num_accepted": torch.ones(3, dtype=torch.int64)}
        result = engine(name).run([call_of(case, **{**given, **accepted, **wrong})])[0]
        assert result.status == "refused"
        assert message in result.message


@pytest.mark.parametrize("name", DECODE)
@pytest.mark.parametrize("family", ["gaussian", "exact"])
def test_decode_kernel_gives_the_rule_from_gates_of_its_own(engine, name, family):
    case = case_of(family, seed=3)
    outputs = run(engine(name), call_of(case))
    for n, length in enumerate(LENGTHS):
        output, state = true(case, n, length)
        start = int(case["cu_seqlens"][n])
        limit = 1e-30 if family == "exact" else 0.004
        if family == "exact":
            assert torch.equal(outputs["final_state"][n].double(), state[0])
        assert close(outputs["final_state"][n], state[0], limit)
        assert close(outputs["output"][start : start + length], output, max(limit, 0.01))


def test_gate_that_a_kernel_cannot_make_is_refused():
    g, beta = torch.full((2, 1), -0.5), torch.full((2, 1), 0.5)
    with pytest.raises(Refused, match="cannot grow"):
        gate_inputs("x.decode", {"g": -g, "beta": beta})
    with pytest.raises(Refused, match=r"outside \[0, 1\]"):
        gate_inputs("x.decode", {"g": g, "beta": beta * 4})


@settings(max_examples=60, deadline=None)
@given(
    decay=st.lists(st.floats(0, 60) | st.floats(0, 1e-4) | st.just(0.0), min_size=1, max_size=6),
    beta=st.floats(0, 1),
)
def test_made_gate_inputs_give_g_and_beta_back_to_float32(decay, beta):
    g = -torch.tensor(decay, dtype=torch.float32)[:, None]
    beta = torch.full_like(g, beta)
    made = gate_inputs("x.decode", {"g": g, "beta": beta})
    x = made.a + made.dt_bias
    softplus = torch.where(x <= 20.0, torch.log(1.0 + torch.exp(x)), x)
    back = -torch.exp(made.A_log) * softplus
    assert bool(((back.double().exp() - g.double().exp()).abs() <= 2.0**-21).all())
    assert torch.equal(back[g == 0], torch.zeros_like(back[g == 0]))
    assert bool(((torch.sigmoid(made.b) - beta).abs() <= 2.0**-22).all())


def test_given_gate_inputs_are_passed_on_as_they_are():
    raw = {
        "a": torch.randn(2, 3), "b": torch.randn(2, 3), "A_log": torch.randn(3), "dt_bias": torch.randn(3),
    }  # fmt: skip
    made = gate_inputs("x.decode", {**raw, "g": torch.zeros(2, 3), "beta": torch.zeros(2, 3)})
    assert made.given
    assert all(torch.equal(getattr(made, name), raw[name]) for name in raw)


@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize("null", [False, True])
def test_states_kept_beside_the_pool_go_to_the_columns_of_tokens_only(layout, null):
    case = case_of(seed=2)
    given = {**case.tensors, **step(case, 8)}
    given["num_accepted"], given["slot_indices"][2, 1] = torch.ones(3, dtype=torch.int64), -1
    view = ColumnView(given, layout=layout, state_dtype=None, null_slot=null)
    beside = torch.randn(3, COLUMNS, *view.pool.shape[1:])
    view.store(beside)
    pool = view.outputs()["pool"]
    wanted = given["pool"].clone()
    for n, length in enumerate(LENGTHS):
        for column in range(length):
            slot = int(given["slot_indices"][n, column])
            if slot >= 0:
                row = beside[n, column]
                wanted[slot] = row.transpose(-1, -2) if layout == "VK" else row
    assert torch.equal(pool, wanted)
