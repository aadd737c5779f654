"""The recurrent emulation: the recurrence itself without rounding, a drifting state with it."""

import pytest
import torch
from gdncheck.reference.emulation_recurrent import emulate_recurrent
from gdncheck.reference.precision import PROFILES
from gdncheck.reference.recurrence import recurrence

POINTS = ("handover", "l2norm", "beta", "u", "state", "output", "final_state")


def make(lengths, hk=1, hv=2, dk=16, dv=8, dtype=torch.float32, seed=0, decay=0.1):
    draw = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    q, k = (torch.nn.functional.normalize(normal(tokens, hk, dk), dim=-1).to(dtype) for _ in "qk")
    g = -decay * torch.rand(tokens, hv, generator=draw)
    inputs = (q, k, normal(tokens, hv, dv).to(dtype), g, torch.sigmoid(normal(tokens, hv)))
    return (
        inputs,
        normal(len(lengths), hv, dk, dv),
        torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
    )


def relative(x, y):
    return ((x.double() - y).norm() / y.norm()).item()


@pytest.mark.parametrize("lengths", [[40], [1, 30, 0, 7], [5, 5, 5]])
@pytest.mark.parametrize("heads", [(1, 1), (2, 4)])
def test_without_rounding_it_is_the_recurrence(lengths, heads):
    inputs, state, cu = make(lengths, *heads)
    true_out, true_state = recurrence(*inputs, scale=0.3, initial_state=state, cu_seqlens=cu)
    got = emulate_recurrent(*inputs, precision="exact", scale=0.3, initial_state=state, cu_seqlens=cu)
    assert relative(got.output, true_out) < 1e-13
    assert relative(got.final_state, true_state) < 1e-13


def test_fla_rounds_the_output_only():
    inputs, state, cu = make([64, 9], dtype=torch.bfloat16)
    true_out, true_state = recurrence(*inputs, initial_state=state, cu_seqlens=cu)
    got = emulate_recurrent(*inputs, initial_state=state, cu_seqlens=cu)
    assert 1e-3 < relative(got.output, true_out) < 2.5e-3
    assert relative(got.final_state, true_state) < 1e-6


@pytest.mark.parametrize("point", POINTS)
def test_each_cast_point_acts_alone(point):
    inputs, state, cu = make([50, 20])
    call = {"initial_state": state, "cu_seqlens": cu, "l2norm": True}
    exact = emulate_recurrent(*inputs, precision="exact", **call)
    rounded = emulate_recurrent(*inputs, precision=PROFILES["exact"].with_casts(**{point: "bf16"}), **call)
    moved = [relative(rounded.output, exact.output), relative(rounded.final_state, exact.final_state)]
    assert 1e-5 < max(moved) < 5e-2
    if point == "output":
        assert moved[1] == 0
    if point == "final_state":
        assert moved[0] == 0


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_a_narrow_state_drifts_with_the_number_of_tokens(fmt):
    inputs, state, cu = make([256], decay=1e-3)
    _, true_state = recurrence(*inputs, initial_state=state, cu_seqlens=cu)
    kept = PROFILES["fla-recurrent"].with_casts(state=fmt)
    error = relative(emulate_recurrent(*inputs, precision=kept, initial_state=state).final_state, true_state)
    once = PROFILES["fla-recurrent"].with_casts(final_state=fmt)
    rounded_once = emulate_recurrent(*inputs, precision=once, initial_state=state).final_state
    assert error > 1.5 * relative(rounded_once, true_state)
    assert error < 0.2


def test_minus_infinity_is_a_reset_here():
    (q, k, v, g, beta), state, _ = make([30])
    g[12] = -torch.inf
    got = emulate_recurrent(q, k, v, g, beta, initial_state=state)
    after = emulate_recurrent(q[12:], k[12:], v[12:], g[12:], beta[12:])
    assert torch.isfinite(got.output).all()
    assert torch.equal(got.final_state, after.final_state)


def test_a_bad_token_reaches_only_later_tokens_of_its_sequence():
    (q, k, v, g, beta), _, cu = make([20, 20])
    v[5, 0, 3] = torch.nan
    bad = torch.isnan(emulate_recurrent(q, k, v, g, beta, cu_seqlens=cu).output)
    assert bad[5:20, 0, 3].all()
    assert bad.sum() == 15


def test_splitting_anywhere_keeps_every_bit():
    inputs, state, _ = make([50], dtype=torch.bfloat16)
    whole = emulate_recurrent(*inputs, initial_state=state)
    first = emulate_recurrent(*(x[:17] for x in inputs), initial_state=state)
    second = emulate_recurrent(*(x[17:] for x in inputs), initial_state=first.final_state)
    assert torch.equal(second.final_state, whole.final_state)
    assert torch.equal(torch.cat([first.output, second.output]), whole.output)


def test_nothing_to_do():
    inputs, state, _ = make([3])
    got = emulate_recurrent(*(x[:0] for x in inputs), cu_seqlens=torch.tensor([0, 0]), initial_state=state)
    assert torch.equal(got.final_state, state)
    none = emulate_recurrent(*(x[:0] for x in inputs), cu_seqlens=torch.tensor([0]))
    assert none.final_state.shape[0] == 0
