"""A kernel by import path with `l2norm: both`: told to normalise itself, or judged by what it was given."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from gdncheck.capture.make import make
from gdncheck.compare.inputs import call_of
from gdncheck.compare.session import Settings, diff_one
from gdncheck.compare.soundness import soundness_of
from gdncheck.compare.sweep.sweep import sweep
from gdncheck.compare.witness import Witness
from gdncheck.kernels.callable import CallableAdapter, read_capabilities
from gdncheck.kernels.interface import RunResult
from gdncheck.kernels.loading import Device
from gdncheck.kernels.worker import run_call
from gdncheck.reference.truth import truth

# Rounds its output and nothing else: whatever rounding of q and k comes on top shows at once.
DECLARED = {"l2norm": "both", "profile": "hf-torch"}


def told(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens,
         use_qk_l2norm_in_kernel=False):  # fmt: skip
    output, state = truth(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
        l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return output.to(v.dtype), state.float()


def untold(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
    return told(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip


told.gdncheck_capabilities = untold.gdncheck_capabilities = DECLARED


class Open:
    """The kernel in this process; `more` goes into every call's options."""

    def __init__(self, function, **more):
        self.adapter = CallableAdapter("a:kernel", function, read_capabilities(DECLARED, "a:kernel"))
        self.info, self.more = self.adapter.describe(), more

    def run(self, calls):
        results = []
        for call in calls:
            call = msgspec.structs.replace(call, options=msgspec.structs.replace(call.options, **self.more))
            finished, outputs = run_call(self.adapter, call, Device("cpu", ("cpu",)))
            outputs = dict(zip(finished.names, outputs, strict=True))
            results.append(RunResult(status=finished.status, outputs=outputs, message=finished.message))
        return results


@pytest.fixture(scope="module")
def case():
    return make("qwen", lengths=[70], k_heads=1, v_heads=2, dims=(32, 32), qk="raw", state="random", seed=5)


def verdict(runner, case):
    witness = Witness(case, device="cpu", seed=0)
    return diff_one(runner, witness, soundness_of(witness), Settings(relations="none")).ruling


def test_a_kernel_that_takes_both_is_not_asked_to_normalise(case):
    runner = Open(told)
    assert runner.info.capabilities.l2norm == "both"
    assert verdict(runner, case).verdict == "pass"
    (own,), (before,) = runner.run([call_of(case)]), Open(told, l2norm="before").run([call_of(case)])
    assert not torch.equal(own.outputs["output"], before.outputs["output"])


def test_a_kernel_that_cannot_be_told_is_blamed_for_the_rounding_before_it(case):
    runner = Open(untold)
    assert runner.info.capabilities.l2norm == "before"
    ruling = verdict(runner, case)
    assert ruling.verdict == "pass", ruling.reason


@pytest.mark.slow
@pytest.mark.parametrize("value", ["in-kernel", "before-rounded"])
def test_the_axis_judges_by_the_other_place(case, value, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    report = sweep(
        case, kernels=[f"{Path(__file__).stem}:told"], device="cpu", only=["l2norm"], axes={"l2norm": [value]}
    )
    assert report.verdict == "pass", [a.reason for a in report.sweeps[0].attempts]
    (attempt,) = [a for a in report.sweeps[0].attempts if a.config["l2norm"] == value]
    assert attempt.verdict == "pass"


def test_a_kernel_that_forgets_to_normalise_passes(case):
    def forgets(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens,
                use_qk_l2norm_in_kernel=False):  # fmt: skip
        return untold(
            q, k, v, g, beta, scale=scale, initial_state=initial_state,
            output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip

    assert verdict(Open(forgets), case).verdict != "pass"
