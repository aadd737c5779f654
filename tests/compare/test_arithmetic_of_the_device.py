"""A kernel is measured by the arithmetic of the device it ran on, wherever the verdict is computed, and its
bounds are those of the function that it declares."""

from __future__ import annotations

import msgspec
import pytest
import torch
from gdncheck.capture.make import make
from gdncheck.compare.session import Settings, diff_one
from gdncheck.compare.soundness import soundness_of
from gdncheck.compare.witness import Witness
from gdncheck.kernels.contract import Capabilities, Clause, Contract
from gdncheck.kernels.interface import KernelInfo, RunResult
from gdncheck.reference.emulation import emulate_chunk
from gdncheck.reference.emulation_recurrent import emulate_recurrent
from gdncheck.reference.precision import precision_for
from gdncheck.reference.truth import truth

FAMILIES = ("qwen", "no-decay", "parallel-keys", "tiny-decay", "long-memory")


class OnDevice:
    """A runner that says where it ran."""

    def __init__(self, rule, device, *, profile="fla-0.4", clauses=(), chunked=True):
        self.rule = rule
        self.info = KernelInfo(
            name="kernel",
            capabilities=Capabilities(
                profile=profile, clauses=tuple(clauses), default_chunk_size=64 if chunked else None
            ),
            contract=Contract(kernel="kernel", clauses=tuple(clauses)),
            environment={"device": device},
        )

    def run(self, calls, **options):
        return [self.answer(call) for call in calls]

    def answer(self, call):
        t = call.tensors
        output, state = self.rule(
            *(t[name] for name in ("q", "k", "v", "g", "beta")), scale=call.options.scale,
            initial_state=t.get("initial_state"), cu_seqlens=t["cu_seqlens"],
        )  # fmt: skip
        outputs = {"output": output.to(t["v"].dtype), "final_state": state.float()}
        return RunResult(status="ok", outputs=outputs, seconds=0.0)


def verdict(case, runner):
    witness = Witness(case, device="cpu")
    return diff_one(runner, witness, soundness_of(witness), Settings(relations="none"))


def tensor_cores(profile):
    """The profile's algorithm with the dots of a GPU (tf32), computed here."""
    precision = precision_for(profile, device="cuda", chunk_size=64)

    def rule(*inputs, **named):
        result = emulate_chunk(*inputs, precision=precision, chunk_size=64, **named)
        return result.output, result.final_state

    return rule


def cases(dtype):
    for seed, family in enumerate(FAMILIES):
        yield make(family, lengths=(70, 1, 130), dims=(32, 32), dtype=dtype, state="random", seed=seed)


@pytest.mark.parametrize("profile", ["fla-0.4", "fla-0.6"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_gpu_kernel_is_accused_of_tensor_core_arithmetic_because_the_verdict_is_on_a_cpu(profile, dtype):
    for case in cases(dtype):
        result = verdict(case, OnDevice(tensor_cores(profile), "cuda", profile=profile))
        assert result.verdict == "pass", (case.label, result.ruling.reason)


def test_tensor_core_arithmetic_passes_for_a_kernel_that_ran_on_a_cpu():
    for case in cases("fp32"):
        result = verdict(case, OnDevice(tensor_cores("fla-0.4"), "cpu"))
        assert result.verdict == "fail", case.label
        assert result.ruling.tier in (2, 3)


def biased(bias):
    """A float32 recurrence, one token after the other, whose exp errs by the same share at every token."""

    def rule(q, k, v, g, beta, **named):
        result = emulate_recurrent(q, k, v, g + bias, beta, precision="fla-recurrent", **named)
        return result.output, result.final_state

    return rule


def remembering(seed):
    return make("long-memory", lengths=(300, 40), dims=(32, 32), dtype="bf16", state="random", seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_the_bias_of_a_gpus_exp_is_taken_for_a_fault_after_many_tokens(seed):
    for bias in (1.4e-8, -1.4e-8):
        runner = OnDevice(biased(bias), "cuda", profile="fla-recurrent", chunked=False)
        result = verdict(remembering(seed), runner)
        assert result.verdict == "pass", result.ruling.reason


@pytest.mark.parametrize("seed", range(3))
def test_a_bias_beyond_that_of_exp_passes(seed):
    runner = OnDevice(biased(1e-6), "cuda", profile="fla-recurrent", chunked=False)
    # The catalogue may offer a rounded g as an undeclared contract; it never passes.
    assert verdict(remembering(seed), runner).verdict in ("fail", "suspect")


OFFSET = Clause(id="gate.alpha-offset", kind="transform", applies_to="g", value=1e-10, source="test")


def floored(*inputs, **named):
    """Adds to the decay, as the clause says; otherwise without error."""
    q, k, v, g, beta = inputs
    return truth(q, k, v, (g.double().exp() + OFFSET.value).log(), beta, **named)


def resets(seed):
    """One-hot keys and total resets: after them the pure bound on the state is next to nothing."""
    case = make("exact", lengths=(64, 1, 65), dims=(32, 32), dtype="bf16", state="random", seed=seed)
    assert bool((case["g"] < -60).any()), "the family has resets"
    return case


@pytest.mark.parametrize("seed", range(4))
def test_what_a_declared_floor_of_the_decay_keeps_is_taken_for_a_broken_bound(seed):
    result = verdict(resets(seed), OnDevice(floored, "cpu", clauses=[OFFSET]))
    assert result.verdict == "pass", result.ruling.reason


@pytest.mark.parametrize("seed", range(4))
def test_a_floor_that_nobody_declared_passes(seed):
    case = resets(seed)
    loud = case.with_tensors(initial_state=case["initial_state"] * 2.0**40)
    result = verdict(loud, OnDevice(floored, "cpu"))
    assert result.verdict in ("fail", "suspect"), result.ruling.reason
    assert msgspec.to_builtins(result.ruling.worst_tile) is not None
    assert torch.isfinite(loud["initial_state"]).all()
