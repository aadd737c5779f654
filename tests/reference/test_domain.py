"""The domain check: silent on sound input, and each departure named at its first token with its severity."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from gdncheck.capture.case import Case, starting_state
from gdncheck.capture.make import make
from gdncheck.reference.domain import DomainFinding, check_domain, describe
from gdncheck.reference.overflow import cancelled, chunk_sums, predict_overflow

NAMES = ("q", "k", "v", "g", "beta")
LENGTHS = [70, 0, 1, 65]
DTYPES = ["bf16", "fp16", "fp32"]


def sound(family="no-decay", **arguments) -> Case:
    return make(family, **{"lengths": LENGTHS, "dims": (64, 16), "state": "random", "seed": 3, **arguments})


def findings(case: Case, **changed) -> list[DomainFinding]:
    tensors = {name: changed.pop(name, case[name]) for name in NAMES}
    arguments = {
        "cu_seqlens": case["cu_seqlens"], "initial_state": starting_state(case), "qk": case.options.qk,
        "scale": case.options.scale, **changed,
    }  # fmt: skip
    return check_domain(**tensors, **arguments)


def only(found: list[DomainFinding], kind: str, tensor: str | None = None) -> DomainFinding:
    matching = [f for f in found if f.kind == kind and tensor in (None, f.tensor)]
    assert len(matching) == 1, [(f.kind, f.tensor) for f in found]
    text = describe(matching[0])
    assert "\n" not in text
    assert matching[0].tensor in text or kind == "decay-sum"
    return matching[0]


def changed(case: Case, name: str, value: float, at) -> torch.Tensor:
    tensor = case[name].clone()
    tensor[at] = value
    return tensor


# -- silent -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "family", ["no-decay", "long-memory", "parallel-keys", "identical-keys", "beta-zero", "gaussian"]
)
def test_sound_families_give_no_finding_at_all(family, dtype):
    for seed in range(2):
        quiet = sound(family, dtype=dtype, seed=seed)
        if family == "gaussian":  # its realistic gates may deserve the hint on decay sums
            assert [f for f in findings(quiet) if f.kind != "decay-sum"] == []
        else:
            assert findings(quiet) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "family", ["qwen", "exact", "exact-raw", "tiny-decay", "mixed-decay", "minus-inf", "negative-eigenvalues"]
)
def test_hard_but_sound_families_give_hints_only(family, dtype):
    for seed in range(2):
        assert {f.severity for f in findings(sound(family, dtype=dtype, seed=seed))} <= {"hint"}


def test_scaled_values_and_states_are_sound():
    for power in (-60, -20, 20, 60):
        case = sound(dtype="fp32")
        scaled = findings(case, v=case["v"] * 2.0**power, initial_state=case["initial_state"] * 2.0**power)
        assert scaled == []


def test_no_tokens_no_heads_to_complain_about():
    for lengths in ([0], [0, 0]):
        assert findings(sound(lengths=lengths)) == []


def test_stale_row_of_a_fresh_sequence_may_hold_anything():
    case = sound()
    state = changed(case, "initial_state", float("nan"), 0)
    fresh = torch.tensor([False, True, True, True])
    assert findings(case, initial_state=state, has_initial_state=fresh) == []
    assert only(findings(case, initial_state=state), "non-finite").sequence == 0


def test_keys_normalised_with_eps_in_bf16_arithmetic_are_sound():
    raw = torch.randn(200, 2, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    unit = raw * torch.rsqrt(raw.square().sum(-1, keepdim=True) + 1e-6)
    case = make("no-decay", lengths=[200], dims=(128, 16))
    assert findings(case, q=unit, k=unit) == []


# -- fires ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_first_nonfinite_token_is_named_per_tensor(name, value):
    case = sound()
    tensor = changed(case, name, value, slice(76, 90))
    if name == "g" and value == -math.inf:
        assert only(findings(case, g=tensor), "gate-inf").severity == "hint"
        return
    found = only(findings(case, **{name: tensor}), "non-finite")
    assert (found.severity, found.tensor, found.sequence, found.token, found.count) == (
        "bad-input",
        name,
        3,
        5,
        14,
    )
    assert (
        found is findings(case, **{name: tensor})[0]
        or findings(case, **{name: tensor})[0].kind == "non-finite"
    )


def test_earliest_token_over_all_tensors_comes_first():
    case = sound()
    found = findings(case, q=changed(case, "q", math.nan, 90), v=changed(case, "v", math.inf, 20))
    assert [(f.tensor, f.row) for f in found] == [("v", 20), ("q", 90)]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_rows_of_1e38_are_bad_input_from_their_first_token(name, dtype):
    case = sound(dtype=dtype)
    found = only(findings(case, **{name: changed(case, name, 1e38, slice(50, 60))}), "huge")
    assert (found.severity, found.tensor, found.sequence, found.token, found.count) == (
        "bad-input",
        name,
        0,
        50,
        10,
    )


def test_huge_state_is_named_by_sequence_and_head():
    case = sound()
    found = only(findings(case, initial_state=changed(case, "initial_state", 1e38, (2, 1))), "huge")
    assert (found.tensor, found.sequence, found.head, found.token) == ("initial_state", 2, 1, None)
    half = sound(dtype="fp16")
    state = changed(half, "initial_state", 1e5, (0, 0))
    assert only(findings(half, initial_state=state), "huge").severity == "bad-input"


def test_positive_gate_is_outside():
    case = sound("long-memory")
    found = only(findings(case, g=changed(case, "g", 0.3, (75, 2))), "gate-sign")
    assert (found.severity, found.sequence, found.token, found.head) == ("outside", 3, 4, 2)
    assert found.value == pytest.approx(0.3)


def test_linear_decay_passed_as_log_and_log_passed_as_linear():
    case = sound("qwen")
    assert only(findings(case, g=case["g"].exp()), "gate-space").severity == "outside"
    assert only(findings(case, gate_space="linear"), "gate-space").severity == "outside"
    assert [f for f in findings(case, g=case["g"].exp(), gate_space="linear") if f.severity != "hint"] == []
    found = only(findings(case, g=case["g"].exp() + 1, gate_space="linear"), "gate-sign")
    assert found.severity == "outside"


def test_beta_below_zero_above_one_and_above_two():
    case = sound(beta_dtype="fp32")
    negative = only(findings(case, beta=changed(case, "beta", -0.1, (10, 3))), "beta-range")
    assert (negative.severity, negative.token, negative.head) == ("outside", 10, 3)
    assert only(findings(case, beta=changed(case, "beta", 1.5, 10)), "beta-above-1").severity == "hint"
    assert only(findings(case, beta=changed(case, "beta", 2.5, 10)), "beta-range").severity == "outside"


def test_beta_logits_are_recognised():
    case = sound(beta_dtype="fp32")
    logits = torch.logit(case["beta"].clamp(0.01, 0.99)) * 2
    assert any("logits" in f.consequence for f in findings(case, beta=logits))


@pytest.mark.parametrize("dtype", DTYPES)
def test_forgotten_l2norm_is_outside_for_keys(dtype):
    found = findings(sound("forgotten-l2norm", dtype=dtype))
    key = only(found, "key-norm")
    assert (key.severity, key.token, key.sequence) == ("outside", 0, 0)
    assert "l2norm" in key.consequence
    assert only(found, "query-norm").severity == "hint"


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_times_eight_are_outside_when_normalised_and_sound_when_raw(dtype):
    case = sound(dtype=dtype)
    assert only(findings(case, k=case["k"] * 8), "key-norm").severity == "outside"
    raw = findings(case, q=case["q"] * 8, k=case["k"] * 8, qk="raw")
    assert raw == []


def test_long_key_with_tiny_beta_is_only_a_hint():
    case = sound()
    found = findings(case, k=case["k"] * 8, beta=case["beta"] / 128)
    assert only(found, "key-norm").severity == "hint"


def test_one_long_key_is_found_at_its_token():
    case = sound()
    k = case["k"].clone()
    k[80, 1] *= 2
    beta = changed(case, "beta", 1.0, 80)
    found = only(findings(case, k=k, beta=beta), "key-norm")
    assert (found.sequence, found.token, found.head, found.count) == (3, 9, 1, 1)


def test_doubled_l2norm_zero_rows_and_eps_dominated_rows_are_hints():
    case = sound()
    doubled = findings(case, qk="raw")
    assert {f.kind for f in doubled} == {"double-l2norm"}
    assert only(findings(case, k=changed(case, "k", 0.0, (7, 0))), "zero-row").token == 7
    raw = sound("gaussian")
    k = raw["k"].clone()
    k[9] *= 1e-4
    assert only(findings(raw, k=k), "eps-dominated").token == 9
    assert {f.severity for f in doubled} == {"hint"}


def test_raw_norm_that_overflows_float32_is_bad_input():
    case = sound("gaussian", dtype="fp32")
    k = changed(case, "k", 1e19, 30)  # each square is finite, 64 of them are not
    found = only(findings(case, k=k), "l2norm-overflow")
    assert (found.severity, found.token) == ("bad-input", 30)


@pytest.mark.parametrize("cu", [[0, 70, 69, 136], [1, 70, 71, 136], [0, 70, 71, 130], [0]])
def test_broken_cu_seqlens_is_the_only_finding(cu):
    case = sound()
    found = findings(case, cu_seqlens=torch.tensor(cu), initial_state=None)
    assert [(f.kind, f.severity, f.tensor) for f in found] == [("index", "bad-input", "cu_seqlens")]


def test_slot_out_of_range_is_named():
    case = sound()
    slots = torch.tensor([0, -1, 7, 2])
    assert only(findings(case, slot_indices=slots, n_slots=4), "index").value == 7
    assert findings(case, slot_indices=slots, n_slots=8) == []


def test_scale_that_is_not_finite_is_bad_input():
    assert only(findings(sound(), scale=math.inf), "non-finite").tensor == "scale"


def test_gate_whose_sum_overflows_float32_is_outside():
    case = sound("long-memory", dtype="fp32")
    assert only(findings(case, g=changed(case, "g", -3e38, 5)), "gate-overflow").severity == "outside"


# -- decay sums -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "chunk_size"),
    [(-5.6, 16), (-5.5, 32), (-2.8, 32), (-2.75, 64), (-1.4, 64), (-1.38, 128), (-0.7, 128), (-0.69, None)],
)
def test_predicted_chunk_size_follows_the_mean_decay(mean, chunk_size):
    g = torch.full((256, 2), mean)
    predicted = predict_overflow(g, torch.tensor([0, 256]))
    assert predicted.chunk_size == chunk_size
    if chunk_size:
        assert float(torch.exp(torch.tensor(predicted.decay_sum))) == math.inf


def test_prediction_restarts_at_every_sequence_and_names_the_place():
    g = torch.zeros(100, 3)
    g[40:60, 1] = -10.0
    assert predict_overflow(g, torch.tensor([0, 50, 100])).chunk_size == 16
    found = predict_overflow(g, torch.tensor([0, 50, 100]))
    assert (found.row, found.head) == (58, 1), "tokens 50..58 pass 88.7 at the ninth"
    assert predict_overflow(g, torch.tensor(range(0, 101, 5))).chunk_size is None


def test_short_sequences_cannot_overflow_however_large_the_chunk():
    g = torch.full((40, 1), -6.0)
    assert predict_overflow(g, torch.tensor([0, 10, 20, 30, 40])).chunk_size is None


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_chunk_sums_are_the_cumsum_of_each_chunk(chunk_size):
    g = -torch.rand(150, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bounds = [0, 1, 1, 70, 150]
    sums = chunk_sums(g, torch.tensor(bounds), chunk_size)
    for start, end in pairwise(bounds):
        for first in range(start, end, chunk_size):
            last = min(first + chunk_size, end)
            assert torch.allclose(sums[first:last], g[first:last].cumsum(0), atol=1e-12)


def test_channel_gates_are_predicted_by_their_worst_channel():
    g = torch.zeros(64, 1, 4)
    g[:, 0, 3] = -6.0
    assert predict_overflow(g, torch.tensor([0, 64])).chunk_size == 16


def test_small_gate_behind_a_huge_one_is_swallowed_by_a_float32_sum():
    cu = torch.tensor([0, 64])
    g = torch.full((64, 1), -0.01)
    g[20] = -1e5
    row, head, error = cancelled(g, cu, torch.bfloat16)
    assert (row, head) == (21, 0)
    assert error > 1e-3
    case = make("no-decay", lengths=[64], k_heads=1, v_heads=1)
    assert only(findings(case, g=g), "cancellation").token == 21


@pytest.mark.parametrize(
    "g",
    [
        torch.full((64, 1), -0.01),
        torch.cat((torch.full((63, 1), -0.01), torch.tensor([[-1e5]]))),
        torch.cat((torch.tensor([[-1e5]]), torch.zeros(63, 1))),
        torch.cat((torch.tensor([[-1e5]]), torch.full((63, 1), -30.0))),
    ],
    ids=["no huge gate", "nothing after it", "zeros after it", "nothing remembered after it"],
)
def test_harmless_gates_are_not_called_cancelled(g):
    assert cancelled(g, torch.tensor([0, 64]), torch.bfloat16) is None
