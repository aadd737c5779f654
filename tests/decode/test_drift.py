"""Drift over many steps: honest rounding passes and grows as its dtype says, hidden rounding is caught.

Rows 15, 16 and 25 of the public faults, as families: where the loop rounds (state, beta, normalised keys)
decides how far a decode run drifts, and only what was declared is excused.
"""

from __future__ import annotations

import pytest
import torch
from gdncheck.capture.errors import BadInput
from gdncheck.capture.make import make
from gdncheck.compare.decode.drift import decode
from gdncheck.compare.decode.stream import checkpoints_of, profiles_of, stream_of
from gdncheck.reference.emulation_recurrent import emulate_recurrent
from gdncheck.reference.recurrence import recurrence

CAPABILITIES = {
    "default_chunk_size": None,
    "profile": "fla-recurrent",
    "state_dtypes": ("float32", "bfloat16", "float16"),
    "l2norm": "both",
}


def kernel(change=None, **capabilities):
    """A float32 recurrence; change(step, state, arguments) -> state spoils what one call hands on."""
    calls = [0]

    def rule(
        q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens,
        use_qk_l2norm_in_kernel=False,
    ):  # fmt: skip
        result = emulate_recurrent(
            q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
            l2norm=use_qk_l2norm_in_kernel,
        )  # fmt: skip
        calls[0] += 1
        state = result.final_state
        if change is not None:
            state = change(calls[0], state, initial_state)
        return result.output.to(v.dtype), state.to(initial_state.dtype)

    rule.gdncheck_capabilities = {**CAPABILITIES, **capabilities}
    return rule


def small(family="qwen", lengths=(48,), **more):
    shape = {"k_heads": 1, "v_heads": 2, "dims": (8, 16), "state": "random", "beta_dtype": "fp32", "seed": 3}
    return make(family, lengths=list(lengths), **{**shape, **more})


@pytest.mark.parametrize("state", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", ["qwen", pytest.param("no-decay", marks=pytest.mark.slow)])
def test_honest_decode_passes_in_every_state_dtype(drift_of, state, family):
    drift = drift_of(kernel(), small(family), 120, state=state)
    assert drift.verdict == "pass", drift.ruling.reason
    assert not any(p.departs for p in drift.points)


def test_drift_is_ordered_by_the_state_dtype_and_stays_below_its_bound(drift_of):
    last = {
        s: drift_of(kernel(), small("no-decay"), 100, state=s).points[-1] for s in ("fp32", "fp16", "bf16")
    }
    assert last["fp32"].pure < last["fp16"].pure / 10 < last["bf16"].pure / 40
    for point in last.values():
        assert point.pure <= point.bound


def test_error_of_a_bfloat16_state_grows_with_the_steps(drift_of):
    points = drift_of(kernel(), small("no-decay"), 200, state="bf16").points
    assert points[-1].pure > 2 * points[0].pure


def test_state_that_is_secretly_kept_in_bfloat16_fails_where_float32_is_declared(drift_of):
    hidden = kernel(lambda step, state, before: state.bfloat16().float())
    drift = drift_of(hidden, small(), 100, state="fp32")
    assert drift.verdict == "fail"
    assert "after step 1 " in drift.ruling.reason
    assert drift_of(hidden, small(), 100, state="bf16").verdict == "pass"


@pytest.mark.parametrize("lost", [40, pytest.param(150, marks=pytest.mark.slow)])
def test_a_step_whose_write_is_lost_is_seen_at_the_next_checkpoint(drift_of, lost):
    forgets = kernel(lambda step, state, before: before.float() if step == lost else state)
    drift = drift_of(forgets, small("no-decay"), 200, state="fp32")
    assert drift.verdict == "fail"
    first = next(p.step for p in drift.points if p.departs)
    assert lost <= first
    assert all(not p.departs for p in drift.points if p.step < lost)
    assert f"after step {first} " in drift.ruling.reason


def test_state_that_leaks_a_little_every_step_is_caught_in_any_dtype(drift_of):
    leaks = kernel(lambda step, state, before: state * (1 - 2.0**-7))
    for state in ("fp32", "bf16"):
        assert drift_of(leaks, small("no-decay"), 100, state=state).verdict == "fail", state


def test_nan_after_many_steps_is_named_as_nan(drift_of):
    def spoil(step, state, before):
        if step == 70:
            state = state.clone()
            state[0, 1, 2, 3] = torch.nan
        return state

    drift = drift_of(kernel(spoil), small(), 128, state="fp32")
    assert drift.verdict == "fail"
    assert drift.ruling.first_nonfinite is not None
    assert drift.ruling.first_nonfinite.head == 1


def test_beta_in_bfloat16_drifts_from_the_pure_recurrence_and_blames_nobody(drift_of):
    """Row 15: b = 0.5 at every step; sigmoid(0.5) is no bfloat16 number."""
    case = small("no-decay")
    case = case.with_tensors(beta=torch.full_like(case["beta"], torch.sigmoid(torch.tensor(0.5)).item()))
    exact, rounded = (drift_of(kernel(), case, 128, beta=b) for b in ("fp32", "bf16"))
    assert exact.verdict == rounded.verdict == "pass"
    assert rounded.points[-1].pure > 50 * exact.points[-1].pure
    assert rounded.points[-1].state < 1e-5


def test_undeclared_rounding_of_beta_is_no_pass_and_declared_is_named(drift_of):
    def rounds(q, k, v, g, beta, **call):
        return kernel()(q, k, v, g, beta.bfloat16(), **call)

    case = small("no-decay")

    def rule(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
        return rounds(
            q, k, v, g, beta, scale=scale, initial_state=initial_state,
            output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip

    rule.gdncheck_capabilities = {**CAPABILITIES, "l2norm": "before"}
    assert drift_of(rule, case, 128).verdict in ("fail", "suspect")
    clause = {
        "id": "beta.dtype", "kind": "transform", "applies_to": "beta", "value": "bfloat16", "source": "test",
    }  # fmt: skip
    rule.gdncheck_capabilities = {**CAPABILITIES, "l2norm": "before", "clauses": [clause]}
    declared = drift_of(rule, case, 128)
    assert declared.verdict == "pass", declared.ruling.reason
    assert declared.ruling.contract_differences


@pytest.mark.parametrize("place", ["in_kernel", "before"])
def test_l2norm_in_the_kernel_or_before_it_passes_and_drifts_by_its_rounding(drift_of, place):
    drift = drift_of(kernel(), small(qk="raw"), 128, l2norm=place)
    assert drift.verdict == "pass", drift.ruling.reason
    assert (drift.points[-1].pure > 1e-4) == (place == "before")


def test_stream_repeats_a_case_token_by_token(drift_of):
    case = small(lengths=(3, 5))
    stream = stream_of(case, 7)
    assert stream.lengths == [7, 7]
    rows = [0, 1, 2, 0, 1, 2, 0, 3, 4, 5, 6, 7, 3, 4]
    assert torch.equal(stream["v"], case["v"][rows])
    assert torch.equal(stream["initial_state"], case["initial_state"])


def test_points_agree_with_the_recurrence_at_every_checkpoint(drift_of):
    case = small()
    drift = drift_of(kernel(), case, 64, state="bf16")
    stream = stream_of(case, 64)
    for point in drift.points:
        n = point.step
        _, state = recurrence(
            stream["q"][:n], stream["k"][:n], stream["v"][:n], stream["g"][:n], stream["beta"][:n],
            scale=stream.scale, initial_state=stream["initial_state"],
        )  # fmt: skip
        by_hand = stream["initial_state"].bfloat16()
        for t in range(n):
            result = emulate_recurrent(
                *(stream[x][t : t + 1] for x in ("q", "k", "v", "g", "beta")), scale=stream.scale,
                initial_state=by_hand,
            )  # fmt: skip
            by_hand = result.final_state.bfloat16()
        error = (by_hand.double() - state).flatten(2).norm(dim=-1) / state.flatten(2).norm(dim=-1)
        assert point.pure == pytest.approx(float(error.max()), rel=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 5, 64, 1000, 4096])
def test_checkpoints_rise_from_the_first_step_to_the_last(steps):
    found = checkpoints_of(steps)
    assert found[0] == 1
    assert found[-1] == steps
    assert len(found) <= 8
    assert list(found) == sorted(set(found))


def test_wrong_arguments_are_told_in_one_line():
    with pytest.raises(BadInput, match="dtype 'int8' is unknown"):
        profiles_of(["int8"], [], [], raw=True)
    with pytest.raises(BadInput, match="normalised already"):
        profiles_of([], [], ["before"], raw=False)
    with pytest.raises(BadInput, match="no token"):
        stream_of(small(lengths=(0,), state="none"), 4)
    with pytest.raises(BadInput, match="--whole"):
        decode(small(), kernels=["emulation.recurrent"], whole=True, state_dtypes=["bf16"])


@pytest.mark.slow
def test_chunk_kernel_is_skipped_unless_the_whole_prefill_is_asked_for():
    report = decode(small(), kernels=["emulation.chunk"], steps=96, device="cpu")
    assert [d.verdict for d in report.drifts] == ["skipped"]
    assert report.exit_status == 3
    report = decode(small(), kernels=["emulation.chunk"], steps=96, whole=True, device="cpu")
    assert report.verdict == "pass", report.drifts[0].ruling.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", ["emulation.chunk", "emulation.recurrent"])
def test_error_over_a_very_long_context_stays_what_rounding_explains(name):
    """Row 25: 131072 tokens, one head, slow decay."""
    case = small("qwen", lengths=(512,), v_heads=1)
    slow = case.with_tensors(g=torch.full_like(case["g"], -1e-4))
    report = decode(slow, kernels=[name], steps=131072, whole=True, device="cpu", time_limit=500)
    assert report.verdict == "pass", report.drifts[0].ruling.reason
    assert all(p.state <= 0.02 for p in report.drifts[0].points)


@pytest.mark.slow
def test_four_thousand_steps_of_each_rounding_profile():
    report = decode(
        small("no-decay", qk="raw"), kernels=["emulation.recurrent"], steps=4096, device="cpu",
        state_dtypes=["fp32", "bf16", "fp16"], beta_dtypes=["fp32", "bf16"], l2norm=["in_kernel", "before"],
    )  # fmt: skip
    assert len(report.drifts) == 12
    assert report.verdict == "pass", [d.ruling.reason for d in report.drifts if d.verdict != "pass"]
