"""Tuners told, pinned, left untuned; equal bits sent once: in a worker, on a tuned Triton kernel."""

from __future__ import annotations

import pytest
import torch
from gdncheck.capture.make import make
from gdncheck.compare.autotune_sweep import autotune_sweep
from gdncheck.kernels import autotune
from gdncheck.kernels.distinct import Distinct, same_bits
from gdncheck.kernels.interface import KernelCall, RunOptions
from gdncheck.kernels.pool import WorkerPool

COPY = "planted_copy_kernel"
TUNED = "gdncheck.kernels.planted_triton:rule"


@pytest.fixture(scope="module")
def case():
    return make("qwen", lengths=[20, 7], k_heads=1, v_heads=2, dims=(32, 32), state="random")


@pytest.fixture(scope="module")
def kernel():
    with WorkerPool(device="cpu", time_limit=120) as pool:
        yield pool.open(TUNED)


@pytest.fixture
def run(kernel, case):
    def call(n=1, **options):
        names = ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state")
        tensors = {name: case[name] for name in names}
        return kernel.run([KernelCall(tensors=tensors, options=RunOptions(scale=case.scale, **options))] * n)

    return call


def test_tuners_of_a_call_are_not_told_or_told_in_every_call(kernel, run):
    kernel.close()
    first, second = run(2)
    (tuner,) = first.evidence["tuners"]
    assert tuner["kernel"] == COPY
    assert [c["BLOCK"] for c in tuner["configurations"]] == [64, 128, 256]
    assert tuner["key"] == ["BAD"]
    assert tuner["left_out"] == ["n"]
    assert "tuners" not in second.evidence


@pytest.mark.parametrize("block", [64, 128, 256])
@pytest.mark.parametrize("name", [COPY, autotune.ANY])
def test_another_configuration_than_the_pinned_one_is_launched(run, block, name):
    (result,) = run(pins={name: {"BLOCK": block}})
    assert result.status == "ok"
    assert f"BLOCK={block}," in result.evidence["launched"][COPY]
    assert "pins_unused" not in result.evidence


def test_a_pin_that_no_kernel_has_goes_unsaid(run):
    (result,) = run(pins={"no_such_kernel": {"BLOCK": 64}})
    assert (result.status, result.evidence["pins_unused"]) == ("ok", ["no_such_kernel"])
    (result,) = run(pins={COPY: {"BLOCK": 63}})
    assert result.status == "refused"
    assert "matches no configuration" in result.message


def test_a_pin_outlives_its_call(run):
    run(pins={COPY: {"BLOCK": 128}})
    (result,) = run()
    assert "BLOCK=256," in result.evidence["launched"][COPY]


def test_equal_answers_travel_in_full_or_unequal_ones_are_called_equal(run, kernel, case):
    first, *others = run(5, distinct=True)
    assert all(result.outputs["output"] is first.outputs["output"] for result in others)
    wrong, right = run(pins={COPY: {"BLOCK": 128}}, distinct=True), run(distinct=True)
    assert not torch.equal(wrong[0].outputs["final_state"], right[0].outputs["final_state"])
    full = run(2)
    assert full[0].outputs["output"] is not full[1].outputs["output"]
    assert torch.equal(full[0].outputs["output"], first.outputs["output"])


def test_bits_are_compared_as_numbers():
    nan, zero = torch.tensor([float("nan"), 1.0]), torch.tensor([0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double())
    assert not same_bits(zero, zero.view(1, 1))
    assert same_bits(torch.empty(0), torch.empty(0))


def test_an_answer_that_was_overwritten_since_is_compared_with():
    kept, tensor = Distinct(), torch.zeros(3)
    assert kept.same_as(0, ["x"], [tensor]) is None
    tensor += 1
    assert kept.same_as(1, ["x"], [tensor]) is None
    assert kept.same_as(2, ["x"], [torch.zeros(3)]) == 0
    assert kept.same_as(3, ["y"], [torch.zeros(3)]) is None


class Config:
    def __init__(self, block):
        self.kwargs, self.num_warps, self.num_stages = {"BLOCK": block}, 4, 3


class OutOfResources(Exception):
    """As Triton names what a GPU cannot hold."""


class Tuner:
    """What `autotune` needs of Triton's tuner; blocks above `limit` do not fit."""

    def __init__(self, limit):
        def kernel_function():
            """Never called."""

        self.fn, self.arg_names, self.keys = kernel_function, ["x", "n"], ["n"]
        self.configs, self.limit, self.ran = [Config(b) for b in (256, 128, 64)], limit, []
        self.cache, self.cache_results = {"key": self.configs[2]}, True

    def prune_configs(self, kwargs):
        return self.configs

    def stock_run(self, *args, **kwargs):
        (chosen,) = self.configs
        if chosen.kwargs["BLOCK"] > self.limit:
            raise OutOfResources("out of shared memory")
        self.ran.append(chosen.kwargs["BLOCK"])
        return "ran"


@pytest.mark.parametrize(("limit", "block"), [(256, 256), (128, 128), (64, 64)])
def test_never_tuned_takes_a_configuration_that_does_not_fit(limit, block):
    tuner = Tuner(limit)
    with autotune.pinned({}, "never") as launched:
        candidates = autotune._candidates(tuner, "kernel_function", (), {})
        found = autotune._run_first_that_fits(
            Tuner.stock_run, tuner, "kernel_function", candidates, (None,), {}
        )
        assert (found, tuner.ran) == ("ran", [block])
        assert launched == {"kernel_function": f"BLOCK={block}, num_warps=4, num_stages=3"}
        assert bool(autotune.compile_failures) == (block < 256)
    assert len(tuner.configs) == 3


def test_a_pin_that_does_not_compile_is_replaced_by_another():
    tuner = Tuner(64)
    with autotune.pinned({"kernel_function": {"BLOCK": 128}}, "never") as launched:
        candidates = autotune._candidates(tuner, "kernel_function", (), {})
        with pytest.raises(OutOfResources):
            autotune._run_first_that_fits(Tuner.stock_run, tuner, "kernel_function", candidates, (None,), {})
        assert launched == {}
        assert "BLOCK=128" in autotune.compile_failures["kernel_function"]
    assert autotune.is_compile_failure(OutOfResources())
    assert not autotune.is_compile_failure(ValueError())


def test_a_forgotten_tuner_remembers_its_choice_in_memory_or_on_disk():
    tuner = Tuner(64)
    autotune.forget(tuner)
    assert (tuner.cache, tuner.cache_results) == ({}, False)


def test_the_bad_configuration_of_a_tuned_kernel_is_missed_or_another_is_blamed(case):
    report = autotune_sweep(case, TUNED, runs=2, tunings=2, device="cpu", time_limit=120)
    assert [(p.configuration, p.outcome, p.verdict) for p in report.pinned] == [
        ({"BLOCK": 64}, "ran", "pass"), ({"BLOCK": 128}, "ran", "fail"), ({"BLOCK": 256}, "ran", "pass"),
    ]  # fmt: skip
    assert report.verdict == "fail"
    assert report.baseline.verdict == "pass"
    assert report.first_failing.result.place.tensor == "state"
    assert report.first_failing.result.place.sequence == 1  # the last block is the last sequence's
    assert [p.same_bits for p in report.pinned] == [True, False, True]
    assert any("fresh tunings" in line for line in report.not_covered)


def test_a_busy_stream_is_claimed_where_there_is_no_gpu(run):
    (result,) = run(busy=True)
    assert (result.status, result.evidence["busy_stream"]) == ("ok", 0)


@pytest.mark.gpu
def test_a_busy_stream_stands_still_or_changes_the_result(case):
    tensors = {name: case[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state")}
    with WorkerPool(device="cuda", time_limit=120) as pool:
        kernel = pool.open(TUNED)
        pins = {COPY: {"BLOCK": 64}}
        calls = [
            KernelCall(tensors=tensors, options=RunOptions(busy=busy, pins=pins)) for busy in (False, True)
        ]
        quiet, beside = kernel.run(calls)
    assert beside.evidence["busy_stream"] > 0
    assert torch.equal(quiet.outputs["final_state"], beside.outputs["final_state"])


@pytest.mark.gpu
def test_a_fresh_tuning_is_not_drawn_again(case):
    tensors = {name: case[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state")}
    with WorkerPool(device="cuda", time_limit=120) as pool:
        kernel = pool.open(TUNED)
        results = kernel.run([KernelCall(tensors=tensors, options=RunOptions(tune="fresh"))] * 2)
    assert [result.status for result in results] == ["ok", "ok"]
    assert all(result.evidence["launched"][COPY].startswith("BLOCK=") for result in results)
    assert results[0].evidence["tuners"][0]["seconds_over_best"]
