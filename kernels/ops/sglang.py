"""SGLang's operations around the rule: `sglang.gate` and `sglang.l2norm`.

Its gated norm imports the engine's JIT and its batch-invariance switch, which nothing stands in for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

from torch import Tensor

from ..contract import Contract
from ..engine_call import prepare_triton
from ..interface import KernelCall
from .adapter import OpAdapter
from .contracts import contract_of_op
from .fla import INTERPRETED

GATING = "sglang.kernels.ops.attention.linear.fused_gdn_gating"


class _SglangOp(OpAdapter):
    family: ClassVar[str] = "sglang"
    package: ClassVar[str | None] = "sglang"
    capabilities = INTERPRETED

    def __init__(self, version: str | None = None) -> None:
        """Import the kernels. Raises CannotRun where their layout is unknown."""
        from ..standins import sglang as standins
        from ..standins.modules import missing_part

        super().__init__(version)
        name = "sglang" if version is None else f"sglang@{version}"
        self.interpreted = prepare_triton()
        _, self.folder = standins.install(name)
        try:
            self.module = import_module(GATING if self.op == "gate" else f"{self.folder}.l2norm")
        except ModuleNotFoundError as error:
            raise missing_part(error, name) from error

    @classmethod
    def contract_for(cls, version: str | None) -> Contract:
        return contract_of_op("sglang", cls.op, version)

    def facts(self) -> dict[str, Any]:
        return {"backend": "triton", "interpreted": self.interpreted, "kernels": self.folder}


class Gate(_SglangOp):
    """`fused_gdn_gating`: beta rounded to the dtype of b, then stored as float32."""

    op, read = "gate", "b"

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        t = call.tensors
        g, beta = self.module.fused_gdn_gating(
            t["A_log"], t["a"].contiguous(), t["b"].contiguous(), t["dt_bias"]
        )
        return {"g": g[0], "beta": beta[0]}


class L2Norm(_SglangOp):
    """`l2norm_fwd` on q and on k."""

    op, read = "l2norm", "q"

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        return {name: self.module.l2norm_fwd(call.tensors[name].contiguous()) for name in ("q", "k")}


KERNELS = {"gate": Gate, "l2norm": L2Norm}
