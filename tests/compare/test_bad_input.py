"""Bad input is named before any kernel is blamed; the kernel is judged on whether it kept the damage in."""

from __future__ import annotations

import msgspec
import pytest
import torch


def spoiled(case, name, row, value):
    tensor = case[name].clone()
    tensor[row] = value
    return case.with_tensors(**{name: tensor})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["q", "k", "v", "beta"])
def test_a_kernel_is_blamed_for_a_bad_tensor(name, value, honest, case_of, verdict_on):
    case = spoiled(case_of(lengths=[20, 70, 30]), name, 20 + 66, value)
    for kernel in (honest.chunk, honest.recurrent):
        result = verdict_on(kernel, case)
        assert result.verdict == "out-of-contract"
        assert f"{name} is" in result.ruling.reason
        assert "token 66 of sequence 1" in result.ruling.reason
        assert "the kernel contained it" in result.ruling.reason, result.ruling.reason


def test_a_kernel_that_spreads_the_damage_is_said_to_contain_it(honest, case_of, verdict_on):
    def spreading(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
        output, state = honest.chunk(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )
        return output + 0 * v.sum(), state

    result = verdict_on(spreading, spoiled(case_of(lengths=[20, 70, 30]), "v", 86, float("nan")))
    assert result.verdict == "out-of-contract"
    assert "did not contain it" in result.ruling.reason


def test_a_kernel_that_is_wrong_elsewhere_is_covered_by_bad_input(honest, case_of, verdict_on):
    def wrong(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
        output, state = honest.chunk(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )
        output[3, 1] = 0
        return output, state

    result = verdict_on(wrong, spoiled(case_of(lengths=[20, 70, 30]), "v", 86, float("nan")))
    assert "did not contain it" in result.ruling.reason
    assert "sequence 0, head 1" in result.ruling.reason


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (lambda c: {"g": c["g"].exp()}, "linear decay"),
        (
            lambda c: {"g": torch.where(torch.arange(len(c["g"]))[:, None] == 9, 2.0, c["g"])},
            "token 9 of sequence 0",
        ),
        (lambda c: {"k": c["k"] * 8}, "l2norm"),
        (lambda c: {"beta": c["beta"] + 2}, "beta"),
        (lambda c: {"beta": c["beta"] - 1}, "beta"),
    ],
    ids=["linear gate", "growing gate", "raw keys", "beta above 2", "negative beta"],
)
def test_input_outside_the_domain_is_judged_as_if_inside(changes, says, honest, case_of, verdict_on):
    case = case_of(lengths=[70])
    result = verdict_on(honest.chunk, case.with_tensors(**changes(case)))
    assert result.verdict == "out-of-contract", result.ruling.reason
    assert "outside the domain" in result.ruling.reason
    assert says in result.ruling.reason


def test_minus_infinity_is_out_of_contract_for_kernels_that_take_it(honest, case_of, verdict_on):
    case = spoiled(case_of(lengths=[20, 70, 30]), "g", 86, float("-inf"))
    assert verdict_on(honest.recurrent, case).verdict == "pass"
    result = verdict_on(honest.chunk, case)
    assert result.verdict == "out-of-contract"
    assert "g is -Inf at token 66 of sequence 1" in result.ruling.reason
    promised = {
        "id": "gate.inf",
        "kind": "domain",
        "applies_to": "g",
        "value": "-inf is a reset",
        "source": "test",
    }
    assert verdict_on(honest.chunk, case, capabilities={"clauses": [promised]}).verdict == "fail"


def test_a_reset_excuses_a_fault_in_another_sequence(honest, case_of, verdict_on):
    def wrong(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
        output, state = honest.chunk(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )
        output[3, 1] = float("nan")
        return output, state

    case = spoiled(case_of(lengths=[20, 70, 30]), "g", 86, float("-inf"))
    assert verdict_on(wrong, case, relations="none").verdict == "fail"


def test_a_stale_slot_counts_as_bad_input(honest, case_of, verdict_on):
    """What a fresh sequence's row holds is nobody's business: NaN there is no input."""
    case = case_of(lengths=[20, 30], state=["random", "stale"])
    result = verdict_on(honest.chunk, spoiled(case, "initial_state", 1, float("nan")))
    assert result.verdict == "pass", result.ruling.reason


def test_overflow_that_the_truth_shares_is_a_fault(honest, case_of, verdict_on, in_process):
    """fp16 ends at 65504: a truth beyond it is stored as an infinity by anybody, and what is below is not."""
    case = case_of(lengths=[5], dtype="fp16", k_heads=1, v_heads=1)
    case = case.with_tensors(
        initial_state=torch.full_like(case["initial_state"], 1.5e4),
        q=torch.full_like(case["q"], 32**-0.5),
        g=torch.zeros_like(case["g"]),
    )
    case = msgspec.structs.replace(case, options=msgspec.structs.replace(case.options, scale=4.0))
    runner = in_process(honest.recurrent)
    result = verdict_on(None, case, runner=runner, relations="none")
    assert not bool(torch.isfinite(runner.run(runner.calls[:1])[0].outputs["output"]).all())
    assert result.verdict == "pass", result.ruling.reason
    assert result.ruling.first_nonfinite is None
