"""The chunk emulation: exact where nothing is rounded, as wrong as a kernel of that precision where it is."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from gdncheck.reference import emulation_arithmetic
from gdncheck.reference.emulation import STAGE_TENSORS, emulate_chunk
from gdncheck.reference.precision import CAST_POINTS, DOTS, PROFILES, Precision, precision_for
from hypothesis import given, settings
from hypothesis import strategies as st

EXACT = PROFILES["exact"]


def recurrence(q, k, v, g, beta, scale, state, cu):
    """The definition, token by token in float64."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    groups = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(groups, 1), k.repeat_interleave(groups, 1)
    out, state = torch.zeros_like(v), state.clone()
    for n, (start, stop) in enumerate(pairwise(cu)):
        s = state[n]
        for t in range(start, stop):
            s = s * g[t].exp()[:, None, None]
            u = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", s, k[t]))
            s = s + k[t][:, :, None] * u[:, None]
            out[t] = scale * torch.einsum("hkv,hk->hv", s, q[t])
        state[n] = s
    return out, state


def make(lengths, hk=1, hv=2, dk=32, dv=24, dtype=torch.float32, seed=0, decay=0.2):
    """A Gaussian call with unit keys: (q, k, v, g, beta), state and cu_seqlens."""
    draw = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    def unit(x):
        return (x / x.norm(dim=-1, keepdim=True)).to(dtype)

    q, k, v = unit(normal(tokens, hk, dk)), unit(normal(tokens, hk, dk)), normal(tokens, hv, dv).to(dtype)
    g = -decay * torch.rand(tokens, hv, generator=draw)
    beta = torch.sigmoid(normal(tokens, hv))
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return (q, k, v, g, beta), normal(len(lengths), hv, dk, dv), cu


def relative(x, y):
    return ((x.double() - y).norm() / y.norm()).item()


lengths = st.lists(st.integers(0, 70), min_size=1, max_size=4).filter(lambda ls: sum(ls) > 0)


@settings(max_examples=15, deadline=None)
@given(
    lengths,
    st.sampled_from([1, 7, 16, 32, 64]),
    st.sampled_from(["substitution", "blocked", "merged", "doubling", "direct"]),
    st.sampled_from([(1, 1), (1, 3), (2, 4)]),
    st.sampled_from(["wu", "error"]),
    st.integers(0, 10**6),
)
def test_without_rounding_it_is_the_recurrence(lengths, chunk_size, solve, heads, way, seed):
    inputs, state, cu = make(lengths, *heads, dk=8, dv=5, seed=seed)
    out, final = recurrence(*inputs, 0.3, state, cu.tolist())
    precision = dataclasses.replace(EXACT, solve=solve, v_new_from=way)
    got = emulate_chunk(
        *inputs, precision=precision, chunk_size=chunk_size, scale=0.3, initial_state=state, cu_seqlens=cu
    )
    assert relative(got.output, out) < 1e-11
    assert relative(got.final_state, final) < 1e-11


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("kkt_from", ["k", "k_beta"])
def test_forms_of_the_decay_and_of_kkt_agree_without_rounding(factored, kkt_from):
    inputs, state, cu = make([50, 3, 81])
    out, _ = recurrence(*inputs, 32**-0.5, state, cu.tolist())
    precision = dataclasses.replace(EXACT, factored_exp=factored, kkt_from=kkt_from)
    got = emulate_chunk(*inputs, precision=precision, initial_state=state, cu_seqlens=cu)
    assert relative(got.output, out) < 1e-11


def test_float32_everywhere_is_float32_accurate():
    inputs, state, cu = make([130, 1, 64])
    out, final = recurrence(*inputs, 32**-0.5, state, cu.tolist())
    got = emulate_chunk(*inputs, precision=Precision("float32"), initial_state=state, cu_seqlens=cu)
    assert got.output.dtype == torch.float32
    assert 1e-9 < relative(got.output, out) < 1e-6
    assert relative(got.final_state, final) < 1e-6


@pytest.mark.parametrize("profile", ["fla-0.4", "fla-0.6", "generic"])
def test_bf16_profiles_err_as_bf16_kernels_do(profile):
    # numerics.md, tier 3: real kernels 3.7e-3 (output) and 2.8e-3 to 3.0e-3 (state) on Gaussian inputs.
    inputs, state, cu = make([192], dk=128, dv=64, dtype=torch.bfloat16)
    out, final = recurrence(*inputs, 128**-0.5, state * 0, cu.tolist())
    got = emulate_chunk(*inputs, precision=profile, cu_seqlens=cu)
    assert 2.5e-3 < relative(got.output, out) < 4.5e-3
    assert 1.5e-3 < relative(got.final_state, final) < 4e-3


def test_transformers_profile_rounds_the_output_only():
    inputs, state, cu = make([200], dtype=torch.bfloat16)
    out, final = recurrence(*inputs, 32**-0.5, state, cu.tolist())
    got = emulate_chunk(*inputs, precision="hf-torch", initial_state=state, cu_seqlens=cu)
    assert 1e-3 < relative(got.output, out) < 2.5e-3
    assert relative(got.final_state, final) < 1e-6


# Points that only some algorithm passes through: what it takes to reach them.
REACH = {
    "solve_step": {"solve": "doubling"},
    "k_decay": {"factored_exp": True},
    "k_left": {"update_decay": "k"},
    "q_decay": {"read_decay": "q"},
    "q_scale": {"scaled": "q"},
    **{point: {"v_new_from": "error"} for point in ("solve_beta", "sk", "error")},
}


@pytest.mark.parametrize("point", CAST_POINTS)
def test_each_cast_point_acts_alone(point):
    inputs, state, cu = make([100, 30], dk=16, dv=8)
    precision = dataclasses.replace(EXACT, **REACH.get(point, {}))
    call = {"initial_state": state, "cu_seqlens": cu, "l2norm": True}
    exact = emulate_chunk(*inputs, precision=precision, **call)
    rounded = emulate_chunk(*inputs, precision=precision.with_casts(**{point: "bf16"}), **call)
    moved = [relative(rounded.output, exact.output), relative(rounded.final_state, exact.final_state)]
    # In T=130 tokens one rounding to 8 bits shows between 1e-4 and a few per cent, and nowhere else.
    if point == "u":  # u of the chunk kernel feeds both
        assert min(moved) > 1e-5
    assert 1e-5 < max(moved) < 5e-2
    if point in ("h", "v_new", "qk_decay", "output"):
        assert moved[1] == 0, "what is stored for the output must not touch the state"
    if point in ("final_state",):
        assert moved[0] == 0


@pytest.mark.parametrize("dot", DOTS)
def test_each_tf32_dot_acts_alone_and_in_both_roundings(dot):
    inputs, state, cu = make([100, 30], dk=16, dv=8)
    call = {"initial_state": state, "cu_seqlens": cu}
    exact = emulate_chunk(*inputs, precision=EXACT, **call)
    moved = []
    for mode in ("toward-zero", "nearest-away"):
        precision = dataclasses.replace(EXACT, dots={dot: "tf32"}, tf32_mode=mode)
        got = emulate_chunk(*inputs, precision=precision, **call)
        moved.append(max(relative(got.output, exact.output), relative(got.final_state, exact.final_state)))
    assert all(1e-6 < m < 5e-3 for m in moved)
    assert moved[0] != moved[1]


def test_a_kernel_may_update_its_state_from_the_stored_v_new():
    inputs, state, cu = make([100, 30], dk=16, dv=8)
    call = {"initial_state": state, "cu_seqlens": cu}
    registers = EXACT.with_casts(v_new="bf16")
    stored = dataclasses.replace(registers, update_from="stored")
    exact, first, second = (emulate_chunk(*inputs, precision=p, **call) for p in (EXACT, registers, stored))
    assert torch.equal(first.final_state, exact.final_state)
    assert 1e-4 < relative(second.final_state, exact.final_state) < 1e-2


@pytest.mark.parametrize("change", [{"update_decay": "k"}, {"read_decay": "q"}, {"scaled": "q"}])
def test_where_a_kernel_multiplies_decay_and_scale_changes_nothing_but_the_rounding(change):
    inputs, state, cu = make([100, 30], dk=16, dv=8)
    call = {"initial_state": state, "cu_seqlens": cu}
    exact = emulate_chunk(*inputs, precision=EXACT, **call)
    moved = emulate_chunk(*inputs, precision=dataclasses.replace(EXACT, **change), **call)
    assert relative(moved.output, exact.output) < 1e-14
    assert relative(moved.final_state, exact.final_state) < 1e-14


def test_rows_of_a_substitution_are_rounded_only_once_all_are_there():
    inputs, state, cu = make([100, 30], dk=16, dv=8)
    call = {"initial_state": state, "cu_seqlens": cu, "stages": True}
    whole = dataclasses.replace(EXACT, solve="substitution", casts={"solve": "bf16"})
    rows = dataclasses.replace(whole, casts={"solve": "bf16", "solve_step": "bf16"})
    exact, once, each = (
        emulate_chunk(*inputs, precision=p, **call).stages["solve"] for p in (EXACT, whole, rows)
    )
    assert relative(each, exact) > relative(once, exact)
    # The first two rows know no rounded row above them.
    assert torch.equal(each[:2], once[:2])
    assert not torch.equal(each[60:64], once[60:64])


@pytest.mark.parametrize("way", ["substitution", "blocked", "merged", "doubling"])
def test_a_half_inverse_errs_by_half_whatever_the_way(way):
    inputs, state, cu = make([100, 30], dk=16, dv=8)
    precision = dataclasses.replace(EXACT, solve=way, casts={"solve": "fp16", "solve_step": "fp16"})
    out, _ = recurrence(*inputs, 16**-0.5, state, cu.tolist())
    got = emulate_chunk(*inputs, precision=precision, initial_state=state, cu_seqlens=cu)
    assert 1e-5 < relative(got.output, out) < 2e-3


def test_tf32_is_left_out_on_a_cpu_and_kept_on_a_gpu():
    assert not precision_for("fla-0.4", device="cpu").dots
    on_gpu = precision_for("fla-0.4", device="cuda")
    assert on_gpu.dot("kkt") == "tf32"
    assert on_gpu.dot("u") == "ieee"
    assert on_gpu.dot("solve") == "ieee"
    assert precision_for("fla-0.6", device="cuda", chunk_size=64).dot("solve") == "tf32"
    assert precision_for("fla-0.6", device="cuda", chunk_size=16).dot("solve") == "ieee"


def test_modes_order_as_rounding_theory_says():
    inputs, state, cu = make([300], hv=4, dtype=torch.bfloat16)
    out, _ = recurrence(*inputs, 32**-0.5, state, cu.tolist())
    error = {}
    for mode in ("nearest-even", "toward-zero", "stochastic"):
        precision = PROFILES["fla-0.4"].with_mode(mode)
        draw = torch.Generator().manual_seed(1)
        got = emulate_chunk(*inputs, precision=precision, initial_state=state, cu_seqlens=cu, generator=draw)
        error[mode] = relative(got.output, out)
    assert 1.25 < error["stochastic"] / error["nearest-even"] < 1.6, "sqrt(2) in theory, 1.42 measured"
    assert error["toward-zero"] > error["stochastic"]


def test_a_narrow_accumulator_shows():
    inputs, state, cu = make([128], dk=128, dtype=torch.bfloat16)
    plain, narrow = (
        emulate_chunk(
            *inputs, precision=dataclasses.replace(PROFILES["fla-0.4"], accumulate=fmt), cu_seqlens=cu
        )
        for fmt in (None, "bf16")
    )
    out, _ = recurrence(*inputs, 128**-0.5, state * 0, cu.tolist())
    assert relative(narrow.output, out) > 1.3 * relative(plain.output, out)


def test_promoted_follows_the_dtype_of_beta():
    table = PROFILES["fla-0.4"]
    assert table.at("k_beta", torch.bfloat16, torch.float32) == "fp32"
    assert table.at("k_beta", torch.bfloat16, torch.bfloat16) == "bf16"
    assert table.at("w", torch.float16) == "fp16"
    assert table.at("kkt", torch.bfloat16) == "fp32"


def test_factored_decay_overflows_at_88_7_and_the_masked_one_never():
    (q, k, v, _, beta), _, cu = make([64])
    limit = math.log(torch.finfo(torch.float32).max)
    assert abs(limit - 88.72) < 0.01
    factored = dataclasses.replace(Precision("factored"), factored_exp=True)
    for total, overflows in ((limit - 0.1, False), (limit + 0.5, True), (200.0, True)):
        g = torch.full((64, 2), -total / 64)
        got = emulate_chunk(q, k, v, g, beta, precision=factored, cu_seqlens=cu)
        assert (~torch.isfinite(got.output)).any() == overflows, f"decay sum {total}"
        assert torch.isfinite(emulate_chunk(q, k, v, g, beta, precision="fla-0.4").output).all()
        # Half the chunk size halves the sum: finite up to twice the limit per 64 tokens.
        half = emulate_chunk(q, k, v, g, beta, precision=factored, chunk_size=32)
        assert torch.isfinite(half.output).all() == (total < 2 * limit)


@pytest.mark.parametrize("g_value", [-5.0, -100.0, -2661.0, -1e30])
def test_large_decays_stay_finite_and_right_as_in_fla(g_value):
    (q, k, v, _, beta), state, cu = make([70, 20])
    g = torch.full((90, 2), g_value)
    out, final = recurrence(q, k, v, g, beta, 32**-0.5, state, cu.tolist())
    got = emulate_chunk(q, k, v, g, beta, precision="fla-0.4", initial_state=state, cu_seqlens=cu)
    assert relative(got.output, out) < 1e-4
    assert relative(got.final_state, final) < 1e-4


def test_minus_infinity_gives_nan_in_its_chunk_only_onwards_as_in_fla():
    (q, k, v, g, beta), _, cu = make([130, 60])
    g[70, 0] = -torch.inf
    got = emulate_chunk(q, k, v, g, beta, precision="fla-0.4", cu_seqlens=cu)
    bad = torch.isnan(got.output).any(-1)
    assert bad[64:130, 0].any()
    assert not bad[:64].any()
    assert not bad[130:].any()
    assert not bad[:, 1].any()


def test_fp16_intermediates_overflow_where_bf16_ones_do_not():
    inputs, _, cu = make([64], dtype=torch.float16)
    big = torch.full((1, 2, 32, 24), 1e6)
    halves = emulate_chunk(*inputs, precision="fla-0.4", initial_state=big, cu_seqlens=cu)
    assert not torch.isfinite(halves.output).all()
    brains = tuple(x.bfloat16() if x.dtype == torch.float16 else x for x in inputs)
    assert torch.isfinite(
        emulate_chunk(*brains, precision="fla-0.4", initial_state=big, cu_seqlens=cu).output
    ).all()


@pytest.mark.parametrize("profile", ["fla-0.4", "hf-torch", "generic"])
def test_a_later_token_changes_no_earlier_bit(profile):
    inputs, state, cu = make([100, 80], dtype=torch.bfloat16)
    call = {"precision": profile, "initial_state": state, "cu_seqlens": cu}
    before = emulate_chunk(*inputs, **call)
    for p in (3, 40, 99, 170):
        changed = [x.clone() for x in inputs]
        for x in changed:
            x[p:] = x[p:] * 0.7
        after = emulate_chunk(*changed, **call)
        assert torch.equal(after.output[:p], before.output[:p])
        assert not torch.equal(after.output[p:], before.output[p:])


def test_a_neighbour_changes_no_bit_of_a_sequence():
    inputs, state, cu = make([70, 33, 64], dtype=torch.bfloat16)
    call = {"precision": "fla-0.4", "cu_seqlens": cu}
    before = emulate_chunk(*inputs, initial_state=state, **call)
    changed, poisoned = [x.clone() for x in inputs], state.clone()
    for x in changed:
        x[70:103] = torch.nan
    poisoned[1] = torch.nan
    after = emulate_chunk(*changed, initial_state=poisoned, **call)
    keep = torch.tensor([*range(70), *range(103, 167)])
    assert torch.equal(after.output[keep], before.output[keep])
    assert torch.equal(after.final_state[[0, 2]], before.final_state[[0, 2]])
    assert torch.isnan(after.output[70:103]).any()


def test_splitting_at_a_chunk_boundary_keeps_every_bit():
    inputs, state, _ = make([200], dtype=torch.bfloat16)
    whole = emulate_chunk(*inputs, precision="fla-0.4", initial_state=state)
    first = emulate_chunk(*(x[:128] for x in inputs), precision="fla-0.4", initial_state=state)
    second = emulate_chunk(*(x[128:] for x in inputs), precision="fla-0.4", initial_state=first.final_state)
    assert torch.equal(torch.cat([first.output, second.output]), whole.output)
    assert torch.equal(second.final_state, whole.final_state)


def test_pieces_do_not_show(monkeypatch):
    from gdncheck.reference import emulation

    inputs, state, cu = make([200, 70], dtype=torch.bfloat16)
    call = {"precision": "fla-0.4", "initial_state": state, "cu_seqlens": cu, "stages": True}
    whole = emulate_chunk(*inputs, **call)
    monkeypatch.setitem(emulation._PIECE_BYTES, "cpu", 1)
    single = emulate_chunk(*inputs, **call)
    assert torch.equal(whole.output, single.output)
    assert torch.equal(whole.final_state, single.final_state)
    for name in STAGE_TENSORS:
        assert torch.equal(whole.stages[name], single.stages[name]), name


def test_empty_calls_and_empty_sequences():
    inputs, state, cu = make([0, 5, 0])
    got = emulate_chunk(*inputs, precision="fla-0.4", initial_state=state, cu_seqlens=cu)
    assert torch.equal(got.final_state[[0, 2]], state[[0, 2]])
    nothing = emulate_chunk(*(x[:0] for x in inputs), precision="fla-0.4", initial_state=state[:1])
    assert nothing.output.shape == (0, 2, 24)
    assert torch.equal(nothing.final_state, state[:1])
    none_at_all = emulate_chunk(*(x[:0] for x in inputs), precision="fla-0.4", cu_seqlens=torch.tensor([0]))
    assert none_at_all.final_state.shape == (0, 2, 32, 24)


def test_stages_are_those_of_the_float64_chunk_form():
    from gdncheck.reference.chunk import chunk_form

    inputs, state, cu = make([70, 64, 3], hk=2, hv=4)
    call = {"chunk_size": 32, "initial_state": state, "cu_seqlens": cu, "stages": True}
    true = chunk_form(*inputs, **call)
    mine = emulate_chunk(*inputs, precision=EXACT, **call)
    assert set(mine.stages) == set(true.stages)
    for name in true.stages:
        assert mine.stages[name].shape == true.stages[name].shape, name
        assert relative(mine.stages[name], true.stages[name]) < 1e-12, name


@pytest.mark.parametrize("stage", STAGE_TENSORS)
def test_a_stage_can_be_replaced_by_tensor_or_function(stage):
    inputs, state, cu = make([70, 20])
    call = {"precision": EXACT, "initial_state": state, "cu_seqlens": cu}
    plain = emulate_chunk(*inputs, **call, stages=True)
    same = emulate_chunk(*inputs, **call, overrides={stage: plain.stages[stage]})
    assert torch.equal(same.output, plain.output), "a stage's own value changes nothing"
    by_tensor = emulate_chunk(*inputs, **call, overrides={stage: plain.stages[stage] * 1.01})
    by_function = emulate_chunk(*inputs, **call, overrides={stage: lambda x: x * 1.01})
    assert not torch.equal(by_tensor.output, plain.output)
    assert torch.equal(by_tensor.output, by_function.output)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(9, 1, 32)}, "q and k must share"),
        ({"v": torch.zeros(9, 2, 24)}, "v must be .* T = 10"),
        ({"g": torch.zeros(10, 2, 32)}, r"g must be \[T, HV\] = \[10, 2\]"),
        (
            {"q": torch.zeros(10, 3, 32), "k": torch.zeros(10, 3, 32)},
            "2 value heads cannot be shared among 3",
        ),
        ({"cu_seqlens": torch.tensor([0, 6, 4, 10])}, "cu_seqlens must rise from 0 to T = 10"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens must rise from 0 to T = 10"),
        ({"initial_state": torch.zeros(2, 2, 32, 24)}, "initial_state must be"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"precision": "fla-9"}, "unknown precision profile 'fla-9'"),
        ({"overrides": {"kt": None}}, "unknown stage 'kt'"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_with_the_numbers(change, message):
    (q, k, v, g, beta), _, _ = make([10])
    call = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "precision": "fla-0.4", **change}
    with pytest.raises(ValueError, match=message):
        emulate_chunk(**call)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"casts": {"wu": "bf16"}}, "unknown cast point 'wu'"),
        ({"casts": {"w": "bf8"}}, "unknown format of w 'bf8'"),
        ({"dots": {"w": "fp16"}}, "unknown operand format of dot w"),
        ({"solve": "guess"}, "unknown solve 'guess'"),
        ({"mode": "up"}, "unknown rounding mode 'up'"),
        ({"accumulate": "fp8"}, "unknown accumulation format"),
    ],
)
def test_a_table_with_an_unknown_word_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Precision("x", **fields)


def test_every_profile_says_where_it_was_read_and_survives_copying():
    import copy

    for name, table in PROFILES.items():
        assert table.name == name
        assert table.source
        assert copy.deepcopy(table) == table


@pytest.mark.parametrize("profile", [name for name in PROFILES if name not in ("exact", "fla-recurrent")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_operands_without_bits_to_lose_are_not_rounded_to_tf32_and_nothing_changes(
    profile, dtype, monkeypatch
):
    """The short cut of `Arithmetic.dot` gives the bits of the long way."""
    inputs, state, cu = make([70, 3], dk=16, dv=8, dtype=dtype)
    precision = precision_for(profile, device="cuda")
    call = {"precision": precision, "initial_state": state, "cu_seqlens": cu, "l2norm": True}
    short = emulate_chunk(*inputs, **call)
    monkeypatch.setattr(emulation_arithmetic.Arithmetic, "_on_grid", lambda self, dot: False)
    monkeypatch.setattr(emulation_arithmetic.Arithmetic, "same_cast", lambda self, one, other: False)
    long = emulate_chunk(*inputs, **call)
    assert torch.equal(short.output, long.output)
    assert torch.equal(short.final_state, long.final_state)
