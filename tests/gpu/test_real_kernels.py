"""Compiled kernels on a GPU: sound ones pass, the same ones called wrongly fail, tuners draw.

Nothing is tuned but where that is asked (GDNCHECK_TUNE=never), so that a cold machine is not kept waiting. A
version that is neither cached nor to be had is skipped.
"""

from __future__ import annotations

import msgspec
import pytest
from gdncheck.capture.errors import CannotRun
from gdncheck.capture.make import make
from gdncheck.compare.diff import diff
from gdncheck.compare.inputs import call_of
from gdncheck.compare.repeats import repeat
from gdncheck.compare.session import Settings, diff_one
from gdncheck.compare.soundness import soundness_of
from gdncheck.compare.sweep.jsonout import document
from gdncheck.compare.sweep.sweep import sweep
from gdncheck.compare.witness import Witness
from gdncheck.kernels import cache, registry
from gdncheck.kernels.pool import WorkerPool

pytestmark = pytest.mark.gpu
KERNELS = (
    "fla.chunk@0.4.0", "fla.chunk@0.6.0", "vllm.chunk@0.19.1", "vllm.chunk@0.33.0", "sglang.chunk@0.5.23",
    "fla.recurrent@0.6.0",
)  # fmt: skip
TUNED = "gdncheck.kernels.planted_triton:rule"


@pytest.fixture(autouse=True)
def _untuned(monkeypatch):
    monkeypatch.setenv("GDNCHECK_TUNE", "never")


@pytest.fixture(scope="module")
def case():
    """Lengths on both sides of a chunk boundary, heads shared two to one, states of which some are used."""
    return make(
        "qwen", lengths=[65, 1, 130], k_heads=2, v_heads=4, dims=(128, 128), dtype="bf16", state="random"
    )


def had(name):
    """The name, or the test is skipped."""
    try:
        registry.resolve(name)
    except CannotRun:
        try:
            cache.fetch(f"{name.partition('.')[0]}@{name.partition('@')[2]}")
        except CannotRun as error:
            pytest.skip(f"{name} cannot be had: {error}")
    return name


@pytest.mark.parametrize("name", KERNELS)
def test_a_sound_compiled_kernel_is_accused(name, case):
    report = diff(case, kernels=[had(name)], device="cuda", relations="quick")
    (result,) = report.results
    assert result.verdict == "pass", result.reason
    assert report.exit_status == 0


class GivenSomethingElse:
    """An open kernel, every call of which gets other tensors than the caller's."""

    def __init__(self, handle, tensors):
        self.handle, self.info, self.tensors = handle, handle.info, tensors

    def run(self, calls):
        return self.handle.run(
            [msgspec.structs.replace(c, tensors={**c.tensors, **self.tensors}) for c in calls]
        )


@pytest.mark.parametrize("tensor", ["initial_state", "g"])
def test_a_compiled_kernel_that_was_given_something_else_passes(tensor, case):
    """What a wrong state layout or gate does to a call."""
    state = case["initial_state"].transpose(-1, -2).contiguous()
    changed = {"initial_state": state} if tensor == "initial_state" else {"g": case["g"] / 2}
    witness = Witness(case, device="cuda", seed=0)
    with WorkerPool(device="cuda") as pool:
        tensors = call_of(case.with_tensors(**changed)).tensors
        runner = GivenSomethingElse(pool.open(had("fla.chunk@0.6.0")), tensors)
        result = diff_one(runner, witness, soundness_of(witness), Settings(relations="none"))
    assert result.ruling.verdict == "fail", result.ruling.reason


def test_a_compiled_kernel_fails_under_a_harmless_change(case):
    report = sweep(
        case, kernels=[had("fla.chunk@0.6.0")], device="cuda",
        only=["chunk_size", "packing", "memory", "repeat"],
        axes={"packing": ["one-token", "poisoned"], "repeat": ["3", "busy"]},
    )  # fmt: skip
    rows = document(report)["results"]
    assert [(a["deviations"], a["reason"]) for a in rows if a["verdict"] not in ("pass", "skipped")] == []
    passed = {f"{n}={v}" for a in rows if a["verdict"] == "pass" for n, v in a["deviations"].items()}
    assert passed >= {
        "chunk_size=32", "packing=poisoned", "memory=nan", "memory=guard", "memory=shared-nan", "repeat=busy",
    }  # fmt: skip


def test_fresh_tunings_are_not_counted(case):
    report = repeat(case, TUNED, runs=2, tunings=3, tuned_at=[16], device="cuda")
    (account,) = report.tuning
    assert account.tuners[0].left_out == ("n",)
    assert [(t.tokens, t.n, sum(t.picks["planted_copy_kernel"].values())) for t in account.tunings] == [
        (16, 3, 3), (196, 3, 3),
    ]  # fmt: skip
    assert account.not_covered == ()


def test_a_bad_pin_is_not_named_where_pins_are_compiled(case):
    plain = document(sweep(case, kernels=[TUNED], device="cuda", only=["autotune"], tunings=2))
    bad = "planted_copy_kernel:BLOCK=128+num_warps=4+num_stages=3"
    assert plain["first_wrong"]["deviations"] == {"autotune": bad}
    assert plain["first_wrong"]["confirmed"]
    (kernel,) = plain["kernels"]
    assert kernel["tuning"]["tunings"]
