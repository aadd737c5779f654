"""Public faults of norm, rounding, solve and input (rows 14 to 17, 23, 25).

Each is a family around the reported input: a sound kernel passes on every member, one with the fault fails
where the fault lies. Numbers are rows of the list of public faults.
"""

from __future__ import annotations

import pytest
import torch
from faulty_model import Fault, family
from faulty_run import verdict_on
from gdncheck.capture.make import make
from gdncheck.reference.bounds import Roundoffs, error_bounds
from gdncheck.reference.emulation import emulate_chunk
from gdncheck.reference.emulation_recurrent import emulate_recurrent
from gdncheck.reference.precision import precision_for
from gdncheck.reference.truth import truth

SHAPE = {"k_heads": 1, "v_heads": 2, "dims": (32, 32), "state": "random"}


def call_of(case):
    names = ("q", "k", "v", "g", "beta", "cu_seqlens")
    return {**{n: case[n] for n in names}, "initial_state": case.get("initial_state"), "scale": case.scale}


def relative(got, want):
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())


# Row 14: missing or doubled l2norm.


@pytest.mark.parametrize("factor", family([8.0, 1.0 / 8, 1.0], keep=1))
def test_raw_keys_of_another_length_change_the_verdict(factor):
    case = make("gaussian", lengths=[70, 5], **SHAPE)
    raw = case.with_tensors(q=case["q"] * factor, k=case["k"] * factor)
    assert verdict_on("chunk", raw).verdict == "pass"
    ruling = verdict_on("l2norm_missing", raw).ruling
    assert ruling.verdict == "fail", ruling.reason


@pytest.mark.parametrize("keys", ["forgotten-l2norm", "qwen times 8"])
def test_keys_without_l2norm_blame_the_kernel(keys):
    if keys == "forgotten-l2norm":
        case = make(keys, lengths=[70, 5], **SHAPE)
    else:
        case = make("qwen", lengths=[70, 5], **SHAPE)
        case = case.with_tensors(k=case["k"] * 8)
    ruling = verdict_on("chunk", case).ruling
    assert ruling.verdict == "out-of-contract"
    assert ruling.tier == 1
    assert "k| is" in ruling.reason or "k is" in ruling.reason, ruling.reason
    assert "l2norm" in ruling.reason


# Row 15: which of beta and l2norm is rounded to bfloat16.

BETA_ROUNDED = Fault({"beta": lambda b, run: b.bfloat16().float()}, base="recurrent")
BETA_DECLARED = Fault(BETA_ROUNDED.edits, base="recurrent", clauses={"beta.dtype": "bfloat16"})


@pytest.mark.parametrize("logit", family([0.5, -1.3, 2.1], keep=1))
def test_a_rounded_beta_is_a_fault_where_declared_or_nothing_where_not(logit):
    case = make("qwen", lengths=[200], dtype="fp32", **SHAPE)
    case = case.with_tensors(beta=torch.full_like(case["beta"], float(torch.tensor(logit).sigmoid())))
    assert verdict_on("recurrent", case).verdict == "pass"
    declared = verdict_on(BETA_DECLARED, case).ruling
    assert declared.verdict == "pass", declared.reason
    assert "beta.dtype" in {d.clause for d in declared.contract_differences}
    silent = verdict_on(BETA_ROUNDED, case).ruling
    assert silent.verdict in ("suspect", "fail"), silent.reason
    assert "beta" in silent.reason


@pytest.mark.parametrize("steps", [400, pytest.param(4096, marks=pytest.mark.slow)])
def test_the_drift_of_three_rounding_profiles_is_out_of_order(steps):
    """Everything float32; q and k rounded after l2norm; beta rounded as well."""
    case = make(
        "gaussian", lengths=[steps], k_heads=1, v_heads=1, dims=(32, 32), dtype="bf16", beta_dtype="fp32"
    )
    case = case.with_tensors(beta=torch.full_like(case["beta"], float(torch.tensor(0.5).sigmoid())))
    exact, _ = truth(**call_of(case), l2norm=True)
    profile = precision_for("fla-recurrent").with_casts(output="fp32")
    errors = []
    for casts in ({}, {"l2norm": "native"}, {"l2norm": "native", "beta": "bf16"}):
        result = emulate_recurrent(**call_of(case), l2norm=True, precision=profile.with_casts(**casts))
        errors.append(relative(result.output, exact))
    assert errors[0] < 2e-6
    assert errors[0] * 100 < errors[1] < errors[2] < 0.02


# Row 16: a state kept in bfloat16.


@pytest.mark.parametrize("name", family(["qwen", "long-memory"], keep=1))
def test_a_state_kept_in_bfloat16_is_told_from_float32(name):
    case = make(name, lengths=[512], k_heads=1, v_heads=1, dims=(32, 32), dtype="fp32", state="random")
    call = call_of(case)
    output, final = truth(**call)
    errors = {}
    for kept in ("fp32", "bf16"):
        result = emulate_recurrent(
            **call, precision=precision_for("fla-recurrent").with_casts(state=kept, final_state=kept)
        )
        stored = 0.0 if kept == "fp32" else 2.0**-8
        single = dict.fromkeys(("state", "accumulate", "operand", "output"), 2.0**-24)
        bound = error_bounds(**call, roundoffs=Roundoffs(**single, stored_state=stored))
        size = (result.output.double() - output).flatten(1).norm(dim=-1)
        assert bool((size <= bound.output.flatten()).all())
        errors[kept] = relative(result.output, output), relative(result.final_state, final)
    assert errors["bf16"][0] > 1000 * errors["fp32"][0]
    assert verdict_on("state_in_bfloat16_at_each_token", case).verdict == "fail"
    assert verdict_on("recurrent", case).verdict == "pass"


# Row 17: a badly conditioned solve.


@pytest.mark.parametrize("name", ["parallel-keys", "identical-keys"])
@pytest.mark.parametrize("dtype", family(["bf16", "fp32"], keep=1))
def test_nearly_parallel_keys_break_a_sound_kernel_or_hide_a_bad_solve(name, dtype):
    case = make(name, lengths=[130, 40], dtype=dtype, **SHAPE)
    assert verdict_on("chunk", case).verdict == "pass"
    for fault in ("solve_takes_two_terms_of_the_series", "solve_takes_six_terms_of_the_series"):
        assert verdict_on(fault, case).verdict == "fail"
    solve = Fault({"solve": lambda t, run: t * (1 + 0.05 * (t.abs() > 0.5))})
    assert verdict_on(solve, case).verdict == "fail"


@pytest.mark.parametrize("name", ["parallel-keys", "identical-keys", "negative-eigenvalues"])
def test_the_inverse_leaves_its_bounds_or_a_residual(name):
    """|T| <= 1 for unit keys and beta <= 1; (I + A) T = I, row by row."""
    case = make(name, lengths=[128], k_heads=1, v_heads=1, dims=(32, 32), dtype="fp32")
    result = emulate_chunk(**call_of(case), stages=True, precision="exact")
    for chunk in range(2):
        rows = slice(chunk * 64, chunk * 64 + 64)
        kkt, solve = result.stages["kkt"][rows, 0].double(), result.stages["solve"][rows, 0].double()
        residual = (torch.eye(64, dtype=torch.float64) + kkt) @ solve - torch.eye(64, dtype=torch.float64)
        largest = float(solve.abs().max())
        assert float(residual.abs().max()) < 1e-10 * max(1.0, largest)
        assert name == "negative-eigenvalues" or largest <= 1 + 1e-5


@pytest.mark.parametrize("seed", family(range(3), keep=1))
def test_beta_up_to_two_blames_a_sound_kernel(seed):
    case = make("negative-eigenvalues", lengths=[130], seed=seed, **SHAPE)
    assert verdict_on("chunk", case).verdict == "pass"
    assert verdict_on("beta_squared", case).verdict == "fail"


# Row 23: the input is bad already.


@pytest.mark.parametrize("tensor", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("value", family([float("nan"), 1e38, float("inf")], keep=2))
def test_bad_input_blames_the_kernel(tensor, value):
    case = make("qwen", lengths=[20, 180], **SHAPE)
    bad = case[tensor].clone()
    bad[20 + 128 :] = value
    ruling = verdict_on("chunk", case.with_tensors(**{tensor: bad})).ruling
    assert ruling.verdict == "out-of-contract", ruling.reason
    assert "input is" in ruling.reason
    assert f"{tensor} is" in ruling.reason or f"{tensor}|" in ruling.reason
    assert "token 128 of sequence 1" in ruling.reason


# Row 25: drift over a very long context.


@pytest.mark.parametrize("length", [4096, pytest.param(131072, marks=pytest.mark.slow)])
def test_the_error_of_a_sound_kernel_grows_with_the_context(length):
    case = make("long-memory", lengths=[length], k_heads=1, v_heads=1, dims=(16, 16), dtype="bf16")
    call = call_of(case)
    output, _ = truth(**call)
    got = emulate_chunk(**call, precision="fla-0.4").output.double()
    eighth = length // 8
    curve = [
        relative(got[i * eighth : (i + 1) * eighth], output[i * eighth : (i + 1) * eighth]) for i in range(8)
    ]
    assert max(curve[1:]) < 4 * curve[1] < 0.1
    # A state that loses its low bits at every token drifts, and that is seen.
    cut = emulate_recurrent(
        **call, precision=precision_for("fla-recurrent").with_casts(state="bf16")
    ).output.double()
    last = slice(-eighth, None)
    assert relative(cut[last], output[last]) > 2 * relative(got[last], output[last])
