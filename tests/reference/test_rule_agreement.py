"""Recurrence, chunk form and truth against each other and against arbitrary precision."""

from __future__ import annotations

import itertools
import math

import mpmath
import pytest
import torch
from gdncheck.reference import chunk
from gdncheck.reference.chunk import chunk_form
from gdncheck.reference.recurrence import recurrence
from gdncheck.reference.truth import truth
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TOLERANCE = 1e-12


def random_case(lengths, HK, shared, K, V, seed, *, channel=False, state=True, gate=0.3, strength=1.0):
    """Unit keys, Gaussian queries and values, log decay -gate * exponential, beta uniform below strength."""
    make = torch.Generator().manual_seed(seed)
    T, HV, N = sum(lengths), HK * shared, len(lengths)

    def normal(*shape):
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(*shape, generator=make, dtype=torch.float64)

    gate_shape = (T, HV, K) if channel else (T, HV)
    tensors = {
        "q": normal(T, HK, K),
        "k": torch.nn.functional.normalize(normal(T, HK, K), dim=-1),
        "v": normal(T, HV, V),
        "g": gate * (1 - uniform(*gate_shape)).log(),
        "beta": strength * uniform(T, HV),
        "cu_seqlens": torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()]),
    }
    if state:
        tensors["initial_state"] = normal(N, HV, K, V)
    return tensors


@st.composite
def cases(draw, longest=300, sequences=4):
    lengths = draw(st.lists(st.integers(0, longest), min_size=1, max_size=sequences))
    return random_case(
        lengths,
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 3, 8, 16])),
        draw(st.sampled_from([1, 5, 8, 16])),
        draw(st.integers(0, 2**20)),
        channel=draw(st.booleans()),
        state=draw(st.booleans()),
        gate=draw(st.sampled_from([0.0, 1e-3, 0.3, 3.0, 30.0])),
        strength=draw(st.sampled_from([0.1, 1.0, 2.0])),
    )


def relative_error(value, expected, dims):
    """Largest error over the largest entry, the worst over the remaining dimensions."""
    if not expected.numel():
        return 0.0
    assert torch.isfinite(expected).all()
    error = (value - expected).abs().amax(dims)
    size = expected.abs().amax(dims)
    return float((error / size.clamp_min(1e-300)).nan_to_num(math.inf).max())


def assert_equal_rule(got, expected, cu_seqlens, tolerance=TOLERANCE):
    """Output per (sequence, head) and state per (sequence, head), each against its own size."""
    (o, s), (o_expected, s_expected) = got, expected
    assert o.dtype == s.dtype == torch.float64
    assert o.shape == o_expected.shape
    assert s.shape == s_expected.shape
    for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        assert relative_error(o[a:b], o_expected[a:b], (0, 2)) < tolerance
    assert relative_error(s, s_expected, (2, 3)) < tolerance


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases(), chunk_size=st.sampled_from([16, 32, 48, 64, 100, 128]))
def test_chunk_form_and_truth_depart_from_the_recurrence(case, chunk_size):
    agree(case, chunk_size)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases(longest=150), chunk_size=st.sampled_from([16, 64, 100]))
def test_the_form_for_a_gpu_departs_from_the_recurrence(case, chunk_size):
    """States by composed steps, in one product per chunk: the same function, also on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk, "few_launches", lambda device: True)
        agree(case, chunk_size)


def agree(case, chunk_size):
    expected = recurrence(**case)
    chunks = chunk_form(**case, chunk_size=chunk_size)
    assert_equal_rule((chunks.output, chunks.final_state), expected, case["cu_seqlens"])
    assert_equal_rule(truth(**case, chunk_size=chunk_size), expected, case["cu_seqlens"])


def exact_rule(case, digits=60):
    """The rule in arbitrary precision, one head and sequence at a time, straight from its definition."""
    q, k, v, g, beta, bounds = (case[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens"))
    T, HV, V = v.shape
    HK, K = q.shape[1:]
    state = case.get("initial_state")
    output, final = torch.zeros(T, HV, V).double(), torch.zeros(len(bounds) - 1, HV, K, V).double()
    with mpmath.workdps(digits):
        number = mpmath.mpf
        for n in range(len(bounds) - 1):
            for h in range(HV):
                S = [
                    [number(0 if state is None else state[n, h, i, c].item()) for c in range(V)]
                    for i in range(K)
                ]
                for t in range(int(bounds[n]), int(bounds[n + 1])):
                    key, query = ([number(y.item()) for y in x[t, h // (HV // HK)]] for x in (k, q))
                    gates = g[t, h].expand(K).tolist()
                    S = [[mpmath.exp(number(gates[i])) * S[i][c] for c in range(V)] for i in range(K)]
                    strength = number(beta[t, h].item())
                    for c in range(V):
                        seen = mpmath.fsum(S[i][c] * key[i] for i in range(K))
                        u = strength * (number(v[t, h, c].item()) - seen)
                        for i in range(K):
                            S[i][c] += key[i] * u
                        read = mpmath.fsum(S[i][c] * query[i] for i in range(K))
                        output[t, h, c] = float(read / mpmath.sqrt(K))
                final[n, h] = torch.tensor([[float(x) for x in row] for row in S], dtype=torch.float64)
    return output, final


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=2),
    shared=st.integers(1, 2),
    channel=st.booleans(),
    gate=st.sampled_from([0.0, 0.3, 30.0]),
    strength=st.sampled_from([1.0, 2.0]),
    seed=st.integers(0, 2**20),
)
def test_a_form_departs_from_arbitrary_precision(lengths, shared, channel, gate, strength, seed):
    case = random_case(lengths, 1, shared, 3, 2, seed, channel=channel, gate=gate, strength=strength)
    expected = exact_rule(case)
    assert_equal_rule(recurrence(**case), expected, case["cu_seqlens"])
    for chunk_size in (4, 5, 16):
        chunks = chunk_form(**case, chunk_size=chunk_size)
        assert_equal_rule((chunks.output, chunks.final_state), expected, case["cu_seqlens"])
        assert_equal_rule(truth(**case, chunk_size=chunk_size), expected, case["cu_seqlens"])


@pytest.mark.parametrize("form", [recurrence, truth])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_inputs_are_not_read_at_their_exact_values(form, dtype):
    case = random_case([70, 3], 2, 2, 8, 4, seed=1)
    rounded = {name: x if name == "cu_seqlens" else x.to(dtype) for name, x in case.items()}
    widened = {name: x if name == "cu_seqlens" else x.double() for name, x in rounded.items()}
    for got, expected in zip(form(**rounded), form(**widened), strict=True):
        assert torch.equal(got, expected)


def test_l2norm_inside_differs_from_l2norm_before():
    from gdncheck.reference.l2norm import l2norm

    case = random_case([70, 3], 2, 2, 8, 4, seed=2)
    case["k"] = case["k"] * 7
    before = {**case, "q": l2norm(case["q"], 1e-3), "k": l2norm(case["k"], 1e-3)}
    for form in (recurrence, truth):
        assert_equal_rule(
            form(**case, l2norm=True, l2norm_eps=1e-3), form(**before), case["cu_seqlens"], 1e-14
        )
    # An eps of zero must not turn the padding of a short chunk into NaN.
    assert_equal_rule(
        truth(**case, l2norm=True, l2norm_eps=0.0),
        recurrence(**case, l2norm=True, l2norm_eps=0.0),
        case["cu_seqlens"],
    )


@pytest.mark.parametrize("form", [recurrence, truth])
def test_scale_is_ignored(form):
    case = random_case([40], 1, 1, 8, 4, seed=3)
    default, half = form(**case)[0], form(**case, scale=0.5)[0]
    assert torch.allclose(default * 8**0.5 * 0.5, half, rtol=1e-14, atol=0)


@pytest.mark.parametrize("form", [recurrence, truth])
def test_value_heads_read_the_wrong_key_head(form):
    case = random_case([50], 3, 2, 8, 4, seed=4)
    expanded = {**case, "q": case["q"].repeat_interleave(2, 1), "k": case["k"].repeat_interleave(2, 1)}
    assert_equal_rule(form(**case), form(**expanded), case["cu_seqlens"], 1e-14)


@pytest.mark.parametrize("form", [recurrence, truth])
def test_packed_sequences_are_not_as_alone(form):
    lengths = [5, 0, 3, 62, 1, 130]
    case = random_case(lengths, 2, 2, 8, 4, seed=5)
    output, final = form(**case)
    bounds = case["cu_seqlens"].tolist()
    for n, (a, b) in enumerate(itertools.pairwise(bounds)):
        alone = {name: case[name][a:b] for name in ("q", "k", "v", "g", "beta")}
        o, s = form(**alone, initial_state=case["initial_state"][n : n + 1])
        assert_equal_rule((o, s), (output[a:b], final[n : n + 1]), torch.tensor([0, b - a]), 1e-14)


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 129])
def test_a_run_cut_in_two_with_its_state_handed_on_is_not_the_uncut_run(cut):
    case = random_case([130], 1, 2, 8, 4, seed=6)
    whole = truth(**case)
    state, outputs = case["initial_state"], []
    for part in (slice(0, cut), slice(cut, 130)):
        tokens = {name: case[name][part] for name in ("q", "k", "v", "g", "beta")}
        o, state = truth(**tokens, initial_state=state)
        outputs.append(o)
    assert_equal_rule((torch.cat(outputs), state), whole, case["cu_seqlens"])


def test_state_at_a_token_is_not_the_final_state_of_the_prefix():
    case = random_case([90, 20], 1, 2, 8, 4, seed=7)
    output, _, states = recurrence(**case, return_states=True)
    for p in (1, 17, 64, 90):
        prefix = {name: case[name][:p] for name in ("q", "k", "v", "g", "beta")}
        o, s = truth(**prefix, initial_state=case["initial_state"][:1])
        assert_equal_rule((o, s), (output[:p], states[p - 1 : p]), torch.tensor([0, p]))
    assert torch.equal(states[89], recurrence(**case)[1][0])
    assert torch.equal(states[109], recurrence(**case)[1][1])


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("form", [recurrence, truth])
def test_a_later_token_changes_the_bits_of_earlier_outputs(form, channel):
    case = random_case([150], 2, 2, 8, 4, seed=8, channel=channel)
    before, final = form(**case)
    for p in (1, 40, 63, 64, 101, 149):
        changed = {name: x.clone() for name, x in case.items()}
        other = random_case([150], 2, 2, 8, 4, seed=9, channel=channel)
        for name in ("q", "k", "v", "g", "beta"):
            changed[name][p:] = other[name][p:]
        after, moved = form(**changed)
        assert torch.equal(before[:p], after[:p])
        assert not torch.equal(before[p:], after[p:])
        assert not torch.equal(final, moved)


@pytest.mark.parametrize("form", [recurrence, truth])
def test_a_constant_decay_per_channel_is_not_a_decay_per_head(form):
    case = random_case([70, 129], 2, 2, 8, 4, seed=10)
    per_channel = {**case, "g": case["g"].unsqueeze(-1).expand(-1, -1, 8)}
    assert_equal_rule(form(**per_channel), form(**case), case["cu_seqlens"], 1e-14)


def test_each_channel_does_not_keep_its_own_decay():
    # One write along each channel, then decay alone: each row of the state must fade at its own rate.
    K, T = 4, 9
    g = -torch.arange(1.0, K + 1).double().expand(T, 1, K)
    k = torch.zeros(T, 1, K).double()
    beta = torch.zeros(T, 1).double()
    k[0] = 0.5
    beta[0] = 1.0
    v = torch.ones(T, 1, 2).double()
    expected = 0.5 * torch.exp(-(T - 1) * torch.arange(1.0, K + 1).double())
    for form in (recurrence, truth):
        final = form(k, k, v, g, beta)[1]
        assert torch.allclose(final[0, 0], expected[:, None].expand(K, 2), rtol=1e-14, atol=0)


@pytest.mark.parametrize("chunk_size", [16, 48, 64])
def test_a_stage_is_not_what_its_definition_says(chunk_size):
    lengths = [70, 0, 5, 130]
    case = random_case(lengths, 2, 2, 8, 4, seed=11)
    result = chunk_form(**case, chunk_size=chunk_size, stages=True)
    stages, C, bounds = result.stages, chunk_size, case["cu_seqlens"].tolist()
    assert set(stages) == {"cumsum", "kkt", "solve", "w", "u", "h", "v_new", "output"}
    chunk = 0
    for n, (a, b) in enumerate(itertools.pairwise(bounds)):
        S = case["initial_state"][n]
        for start in range(a, b, C):
            t = slice(start, min(start + C, b))
            size = t.stop - t.start
            assert torch.allclose(stages["h"][chunk], S, rtol=0, atol=1e-12)
            for h in range(4):
                k, q, v, beta = (
                    case["k"][t, h // 2],
                    case["q"][t, h // 2],
                    case["v"][t, h],
                    case["beta"][t, h],
                )
                G = case["g"][t, h].cumsum(0)
                between = (G[:, None] - G[None, :]).exp()
                A = (beta[:, None] * (k @ k.T) * between).tril(-1)
                inverse = torch.linalg.inv(torch.eye(size).double() + A)
                u, w = inverse @ (beta[:, None] * v), inverse @ (beta[:, None] * k * G.exp()[:, None])
                v_new = u - w @ S[h]
                o = ((q * G.exp()[:, None]) @ S[h] + ((q @ k.T) * between).tril() @ v_new) / 8**0.5
                expected = {"cumsum": G, "u": u, "w": w, "v_new": v_new, "output": o}
                for name, value in expected.items():
                    assert torch.allclose(stages[name][t, h], value, rtol=0, atol=1e-12), name
                for name, value in {"kkt": A, "solve": inverse}.items():
                    assert torch.allclose(stages[name][t, h, :size], value, rtol=0, atol=1e-12), name
                    assert not stages[name][t, h, size:].any(), name
                S = S.clone()
                S[h] = G[-1].exp() * S[h] + (k * (G[-1] - G).exp()[:, None]).T @ v_new
            chunk += 1
        assert torch.allclose(result.final_state[n], S, rtol=0, atol=1e-12)
    assert chunk == len(stages["h"])


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [], [0, 3, 0]])
@pytest.mark.parametrize("form", [recurrence, truth])
def test_an_empty_sequence_does_not_keep_its_state(form, lengths):
    case = random_case(lengths, 1, 2, 8, 4, seed=12)
    output, final = form(**case)
    assert output.shape == (sum(lengths), 2, 4)
    assert final.shape == (len(lengths), 2, 8, 4)
    for n, length in enumerate(lengths):
        assert torch.equal(final[n], case["initial_state"][n]) == (length == 0)
    stages = chunk_form(**case, stages=True).stages
    assert stages["h"].shape[0] == sum(-(-length // 64) for length in lengths)


@pytest.mark.parametrize("shape", [(0, 0, 8, 4), (1, 1, 0, 4), (1, 2, 8, 0), (2, 0, 8, 4)])
def test_a_dimension_of_size_zero_is_not_taken(shape):
    HK, HV, K, V = shape
    sizes = {"q": (5, HK, K), "k": (5, HK, K), "v": (5, HV, V), "g": (5, HV), "beta": (5, HV)}
    case = {name: torch.ones(size) for name, size in sizes.items()}
    for form in (recurrence, truth, lambda **c: (chunk_form(**c).output, chunk_form(**c).final_state)):
        output, final = form(**case)
        assert output.shape == (5, HV, V)
        assert final.shape == (1, HV, K, V)
        assert not output.any()


def test_many_short_sequences_and_small_pieces_change_the_result(monkeypatch):

    case = random_case([1] * 40 + [3, 200, 0, 17], 2, 2, 8, 4, seed=13)
    expected = recurrence(**case)
    for budget in (1, 1 << 18, 1 << 20):
        monkeypatch.setitem(chunk.PIECE_BYTES, "cpu", budget)
        assert_equal_rule(truth(**case), expected, case["cu_seqlens"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 4, 2, 6])}, "falls after entry 1"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "must run from 0 to T = 6"),
        ({"cu_seqlens": torch.tensor([1, 6])}, "must run from 0 to T = 6"),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, "integers"),
        ({"k": torch.ones(6, 1, 4)}, r"k must be \[6, 2, 4\]"),
        ({"v": torch.ones(6, 3, 4)}, "HV must be a multiple of HK"),
        ({"beta": torch.ones(6)}, "beta must be"),
        ({"initial_state": torch.ones(2, 4, 4, 4)}, "initial_state must be"),
    ],
)
def test_shapes_that_do_not_fit_are_not_named(change, message):
    case = {name: torch.ones(6, 2, 4) for name in ("q", "k")}
    case |= {"v": torch.ones(6, 4, 4), "g": torch.zeros(6, 4), "beta": torch.ones(6, 4)} | change
    if "v" in change:
        case |= {"g": torch.zeros(6, 3), "beta": torch.ones(6, 3)}
    for form in (recurrence, chunk_form, truth):
        with pytest.raises(ValueError, match=message):
            form(**case)
