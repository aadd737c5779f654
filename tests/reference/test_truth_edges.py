"""The truth where the chunk form alone would be wrong: it must be the recurrence's, bit for bit in reach.

Every case is compared with the recurrence in class (NaN, +inf, -inf, finite) at every entry, and in
value against the size of its tile. The recurrence itself is held against plain Python floats.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from gdncheck.reference import truth as truth_module
from gdncheck.reference.chunk import chunk_form
from gdncheck.reference.recurrence import recurrence
from gdncheck.reference.truth import truth
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SPECIAL = {
    "q": [math.nan, math.inf, -math.inf, 1e300, 1e30, 0.0],
    "k": [math.nan, math.inf, -math.inf, 1e300, 1e30, 0.0, 3.0],
    "v": [math.nan, math.inf, -math.inf, 1e300, 1e120, 1e20, 0.0],
    "g": [math.nan, math.inf, -math.inf, -1e6, -1000.0, -746.0, -745.0, -300.0, 1e-3, 1.0, 800.0, 0.0],
    "beta": [math.nan, math.inf, -math.inf, 1e30, 3.0, 2.0, 1.0, 0.0, -1.0],
    "initial_state": [math.nan, math.inf, -math.inf, 1e300, 1e120, 1e10, 0.0],
}


def make_case(lengths, seed=0, *, HK=1, shared=2, K=8, V=4, channel=False, gate=0.3, strength=1.0):
    make = torch.Generator().manual_seed(seed)
    T, HV = sum(lengths), HK * shared

    def draw(sample, *shape):
        return sample(*shape, generator=make, dtype=torch.float64)

    return {
        "q": draw(torch.randn, T, HK, K),
        "k": torch.nn.functional.normalize(draw(torch.randn, T, HK, K), dim=-1),
        "v": draw(torch.randn, T, HV, V),
        "g": gate * (1 - draw(torch.rand, *((T, HV, K) if channel else (T, HV)))).log(),
        "beta": strength * draw(torch.rand, T, HV),
        "initial_state": draw(torch.randn, len(lengths), HV, K, V),
        "cu_seqlens": torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()]),
    }


def classes(x):
    """0 finite, 1 +inf, 2 -inf, 3 NaN."""
    return x.isnan() * 3 + x.isposinf() * 1 + x.isneginf() * 2


def assert_reaches_equally(case, chunk_size=64, tolerance=1e-11):
    output, state, states = recurrence(**case, return_states=True)
    o, s = truth(**case, chunk_size=chunk_size)
    assert torch.equal(classes(o), classes(output))
    assert torch.equal(classes(s), classes(state))
    bounds = case["cu_seqlens"].tolist()

    def close(got, expected, dims, scale=None):
        finite = expected.isfinite()
        expected, got = expected.where(finite, 0.0), got.where(finite, 0.0)
        size = expected.abs().amax(dims) if scale is None else scale
        # Below 1e-290 subnormal intermediates have lost their digits in either form.
        return bool(((got - expected).abs().amax(dims) <= tolerance * size.clamp_min(1e-290)).all())

    for n, (a, b) in enumerate(itertools.pairwise(bounds)):
        for start in range(a, b, chunk_size):
            tile = slice(start, min(start + chunk_size, b))
            assert close(o[tile], output[tile], (0, 2))
        recent = states[max(a, b - chunk_size) : b]
        recent = torch.cat([recent, state[n : n + 1]])
        size = recent.where(recent.isfinite(), 0.0).abs().amax((0, 2, 3))
        assert close(s[n], state[n], (1, 2), size)
    return output, state


@st.composite
def spoilt_cases(draw):
    lengths = draw(st.lists(st.sampled_from([0, 1, 5, 64, 100, 150]), min_size=1, max_size=3))
    case = make_case(
        lengths,
        draw(st.integers(0, 2**20)),
        HK=draw(st.integers(1, 2)),
        shared=draw(st.integers(1, 2)),
        K=draw(st.sampled_from([1, 3, 8])),
        V=draw(st.sampled_from([1, 4])),
        channel=draw(st.booleans()),
        gate=draw(st.sampled_from([0.0, 0.01, 0.3, 30.0])),
        strength=draw(st.sampled_from([0.1, 1.0, 2.0])),
    )
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(sorted(SPECIAL)))
        tensor, value = case[name], draw(st.sampled_from(SPECIAL[name]))
        if not tensor.numel():
            continue
        place = [draw(st.integers(0, size - 1)) for size in tensor.shape]
        reach = draw(st.sampled_from(["entry", "entry", "token", "stretch"]))
        if reach == "entry":
            tensor[tuple(place)] = value
        elif reach == "token" or name == "initial_state":
            tensor[place[0]] = value
        else:
            tensor[place[0] : place[0] + 70] = value
    return case


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=spoilt_cases(), chunk_size=st.sampled_from([16, 48, 64]))
def test_an_extreme_input_reaches_further_or_less_far_than_in_the_recurrence(case, chunk_size):
    assert_reaches_equally(case, chunk_size)


def plain_rule(case):
    """One key head and one sequence in Python floats; 0 * inf is NaN there too."""

    def exp(x):
        try:
            return math.exp(x)
        except OverflowError:
            return math.inf

    q, k, v, g, beta = (case[name].tolist() for name in ("q", "k", "v", "g", "beta"))
    state, output = case["initial_state"][0].tolist(), []
    K, V = len(k[0][0]), len(v[0][0])
    for t in range(len(q)):
        reads = []
        for h, S in enumerate(state):
            decay = exp(g[t][h])
            for i in range(K):
                for c in range(V):
                    S[i][c] = decay * S[i][c]
            u = [beta[t][h] * (v[t][h][c] - sum(S[i][c] * k[t][0][i] for i in range(K))) for c in range(V)]
            for i in range(K):
                for c in range(V):
                    S[i][c] = S[i][c] + k[t][0][i] * u[c]
            reads.append([K**-0.5 * sum(S[i][c] * q[t][0][i] for i in range(K)) for c in range(V)])
        output.append(reads)
    return torch.tensor(output, dtype=torch.float64), torch.tensor([state], dtype=torch.float64)


@pytest.mark.parametrize("K", [2, 8, 40])
@pytest.mark.parametrize("name", sorted(SPECIAL))
def test_the_recurrence_carries_a_special_value_elsewhere_than_plain_floats_do(name, K):
    for value in SPECIAL[name]:
        case = make_case([6], seed=3, K=K, V=40)
        # Exact zeros beside the special value: a matrix product that skips them would lose 0 * inf.
        case["k"][:, :, 0] = 0.0
        case["q"][:, :, 1] = 0.0
        case[name][(2 if name != "initial_state" else 0, 0)] = value
        if name in ("q", "k", "v", "initial_state"):
            case[name][..., 1:] = make_case([6], seed=3, K=K, V=40)[name][..., 1:]
        output, state = recurrence(**case)
        expected, expected_state = plain_rule(case)
        assert torch.equal(classes(output), classes(expected)), value
        assert torch.equal(classes(state), classes(expected_state)), value


def chunked_share(case, monkeypatch, **options):
    """Run the truth and say which share of its tokens went through the recurrence."""
    tokens = 0
    original = truth_module.recurrent_chunk

    def counted(x, state, scale, lengths):
        nonlocal tokens
        tokens += int(lengths.sum())
        return original(x, state, scale, lengths)

    monkeypatch.setattr(truth_module, "recurrent_chunk", counted)
    truth(**case, **options)
    monkeypatch.undo()
    T, HV = case["beta"].shape
    return tokens / (T * HV)


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("gate", [-math.inf, -1e6, -1000.0, -746.0, -745.0, -300.0, -20.0])
def test_a_huge_gate_loses_the_digits_of_small_ones_or_leaves_the_chunk_form(gate, channel, monkeypatch):
    case = make_case([200], seed=4, channel=channel, gate=0.01)
    for t in (0, 17, 63, 64, 130, 199):
        case["g"][t, 0] = gate
    assert_reaches_equally(case, tolerance=1e-12)
    assert chunked_share(case, monkeypatch) == 0


@pytest.mark.parametrize("gate", [-2.5, -5.0, -6.0, -20.0, -100.0, -1e3, -2661.0])
def test_a_steady_strong_decay_is_wrong_or_not_finite(gate):
    case = make_case([130], seed=5)
    case["g"].fill_(gate)
    assert_reaches_equally(case, tolerance=1e-12)


def test_a_nan_touches_earlier_tokens_or_other_sequences_or_heads():
    clean = make_case([100, 80, 70], seed=6, HK=2)
    before = truth(**clean)
    for name in ("q", "k", "v", "g", "beta"):
        case = {key: x.clone() for key, x in clean.items()}
        case[name][150, 0] = math.nan
        output, final = truth(**case)
        assert_reaches_equally(case)
        assert output[150, 0].isnan().all()
        assert output[:150].isfinite().all()
        assert torch.allclose(output[:150], before[0][:150], rtol=0, atol=1e-13)
        assert torch.equal(output[:, 2:], before[0][:, 2:])
        assert torch.equal(output[180:], before[0][180:])
        assert torch.equal(final[2], before[1][2])
        # A NaN query is read once; anything else stays in the state.
        assert output[151:180, 0].isnan().all() == (name != "q")


def test_a_nan_makes_all_later_tokens_slow(monkeypatch):
    case = make_case([1000], seed=7)
    case["v"][130, 0, 2] = math.nan
    case["k"][300, 0, 0] = math.nan
    output, _ = assert_reaches_equally(case)
    assert output[130:300, 0, 2].isnan().all()
    assert output[130:300, 0, 3].isfinite().all()
    assert output[300:].isnan().all()
    assert chunked_share(case, monkeypatch) <= 3 * 64 / 1000


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_a_poisoned_state_does_not_stay_in_its_sequence(value):
    clean = make_case([70, 90, 3], seed=8)
    case = {key: x.clone() for key, x in clean.items()}
    case["initial_state"][1] = value
    before, after = truth(**clean), truth(**case)
    assert_reaches_equally(case)
    assert torch.equal(before[0][:70], after[0][:70])
    assert torch.equal(before[0][160:], after[0][160:])
    assert not torch.equal(before[0][70:160], after[0][70:160])


def test_an_infinite_gate_does_not_reset_a_finite_state_and_keeps_an_infinite_one_alive():
    case = make_case([100], seed=9)
    case["g"][40] = -math.inf
    assert_reaches_equally(case)
    tail = {name: case[name][40:] for name in ("q", "k", "v", "g", "beta")}
    fresh = truth(**tail)
    whole = truth(**case)
    assert torch.allclose(whole[0][40:], fresh[0], rtol=0, atol=1e-13)
    assert torch.allclose(whole[1], fresh[1], rtol=0, atol=1e-13)
    case["initial_state"][0, 0, 0, 0] = math.inf
    assert assert_reaches_equally(case)[0][40:, 0, 0].isnan().all()


def test_growth_is_cut_off_or_tamed():
    for seed, change in enumerate(({"k": 12.0}, {"beta": 5.0}, {"g": -1.0})):
        case = make_case([300], seed=seed, gate=0.1)
        for name, factor in change.items():
            case[name] *= factor
        assert_reaches_equally(case)
    # Unnormalised keys overflow on the way: the same tokens must be the first non-finite ones.
    case = make_case([300], seed=10, K=64)
    case["k"] = torch.randn(300, 1, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 4
    output, _ = assert_reaches_equally(case)
    assert not output.isfinite().all()


def test_beta_two_and_parallel_keys_cost_digits_or_leave_the_chunk_form(monkeypatch):
    for spread in (0.0, 1e-3, 0.1):
        case = make_case([500], seed=11, K=16, gate=0.0)
        direction = torch.nn.functional.normalize(case["k"][:1], dim=-1)
        case["k"] = torch.nn.functional.normalize(direction + spread * case["k"], dim=-1)
        case["beta"].fill_(2.0)
        assert_reaches_equally(case, tolerance=1e-12)
        assert chunked_share(case, monkeypatch) == 0


def test_an_overwritten_large_state_leaves_its_rounding_behind():
    # Keys along one axis with beta 1: each token replaces what the one before wrote.
    for value in (1e8, 1e20):
        case = make_case([100], seed=12, K=2)
        case["k"].zero_()[..., 0] = 1.0
        case["beta"].fill_(1.0)
        case["g"].zero_()
        case["initial_state"][:, :, 0] *= value
        case["initial_state"][:, :, 1] = 0.0
        assert_reaches_equally(case, tolerance=1e-14)
        plain = chunk_form(**case).output
        wrong = (plain - recurrence(**case)[0])[2:].abs().max()
        assert wrong > 1e-10, "the case must be one that the chunk form alone gets wrong"


def test_growth_that_a_later_token_erases_leaves_its_rounding_behind():
    # Keys along one axis: beta 30 blows the state up by 29 at each of ten tokens, beta 1 replaces it.
    case = make_case([60], seed=16, K=2)
    case["k"].zero_()[..., 0] = 1.0
    case["beta"].fill_(1.0)
    case["beta"][5:15] = 30.0
    case["g"].zero_()
    case["initial_state"][:, :, 1] = 0.0
    expected, _ = assert_reaches_equally(case)
    fast, _ = truth(**case)
    assert torch.allclose(fast[17:], expected[17:], rtol=0, atol=1e-14)
    plain = chunk_form(**case).output
    assert (plain - expected)[17:].abs().max() > 1e-6, "the chunk form alone must get this case wrong"


def test_ordinary_cases_take_the_slow_form(monkeypatch):
    for options in ({}, {"channel": True}, {"gate": 0.0}, {"strength": 2.0}, {"gate": 30.0}):
        case = make_case([5, 300, 64, 1], seed=13, K=32, V=32, HK=2, **options)
        assert chunked_share(case, monkeypatch) == 0
    rounded = make_case([300], seed=14, K=32, V=32, strength=2.0)
    rounded["k"] = rounded["k"].bfloat16()
    assert chunked_share(rounded, monkeypatch) == 0
    spoilt = make_case([300], seed=15, K=32, V=32)
    spoilt["g"][10] = 0.5
    assert chunked_share(spoilt, monkeypatch) == pytest.approx(64 / 300)
