"""flash-linear-attention's operations around the rule: `fla.gate`, `fla.l2norm`, `fla.norm`.

The idea: the kernel's own public function, from the one version that `fla_package` imports. 0.4 has no gate
kernel: its layer computes g and beta in torch, and so does the adapter, and says so in the evidence.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor

from ...capture.errors import CannotRun
from .. import autotune
from ..contract import Contract
from ..fla_package import STAGE_MODULES, TRITON_ONLY, load
from ..interface import KernelCall
from .adapter import PLAIN, OpAdapter
from .contracts import contract_of_op
from .torch_lines import layer_gate

NORM_MODULES = ("fla.modules.fused_norm_gate", "fla.modules.norm.fused_norm_gate")
GATE_MODULE = "fla.ops.gated_delta_rule.gate"
INTERPRETED = msgspec.structs.replace(PLAIN, max_tokens_cpu=4096)


def first_module(names: tuple[str, ...], what: str) -> Any:
    """The first of some modules that this version has. Raises CannotRun where it has none."""
    for name in names:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise CannotRun(f"{what}: {name} cannot be imported ({error})") from error
    raise CannotRun(f"this version has no {what}; looked for {', '.join(names)}")


class _FlaOp(OpAdapter):
    family: ClassVar[str] = "fla"
    package: ClassVar[str | None] = "fla-core"
    environment: ClassVar[dict[str, str]] = TRITON_ONLY
    capabilities = INTERPRETED

    def __init__(self, version: str | None = None) -> None:
        """Import one version. Raises CannotRun where fla or triton cannot be imported."""
        self.package_module = load(version)
        super().__init__(self.package_module.version)

    @classmethod
    def contract_for(cls, version: str | None) -> Contract:
        return contract_of_op("fla", cls.op, version)

    def facts(self) -> dict[str, Any]:
        return {"backend": "triton", **self.package_module.environment()}

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        with autotune.pinned(call.options.pins) as launched:
            outputs = super().run(call)
        self.evidence["launched"] = dict(launched)
        return outputs


class Gate(_FlaOp):
    """`fused_gdn_gate` (0.5 and later), or the layer's own torch lines."""

    op, read = "gate", "b"

    def __init__(self, version: str | None = None) -> None:
        super().__init__(version)
        try:
            self.fused = import_module(GATE_MODULE).fused_gdn_gate
        except ImportError:
            self.fused = None

    def facts(self) -> dict[str, Any]:
        backend = "torch (the layer's own lines)" if self.fused is None else "triton"
        return {**super().facts(), "backend": backend}

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        t = call.tensors
        if self.fused is None:
            g, beta = layer_gate(t["a"], t["b"], t["A_log"], t["dt_bias"])
            return {"g": g, "beta": beta}
        g = self.fused(t["a"].contiguous(), t["A_log"], t["dt_bias"], output_dtype=torch.float32)
        return {"g": g, "beta": t["b"].sigmoid()}


class L2Norm(_FlaOp):
    """`l2norm_fwd`, as the chunk function calls it on q and on k."""

    op, read = "l2norm", "q"

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        l2norm_fwd = getattr(import_module(STAGE_MODULES["l2norm_fwd"]), "l2norm_fwd")  # noqa: B009
        # The chunk function hands no eps on: the kernel's default is what runs.
        return {name: l2norm_fwd(call.tensors[name].contiguous())[0] for name in ("q", "k")}


class Norm(_FlaOp):
    """`rms_norm_gated`, what FusedRMSNormGated calls: norm, weight, then SiLU of the gate."""

    op, read = "norm", "core_output"

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        t = call.tensors
        function = first_module(NORM_MODULES, "gated norm").rms_norm_gated
        normed = function(
            t["core_output"].contiguous(),
            t["z"].contiguous(),
            t["norm_weight"],
            None,
            activation="swish",
            eps=call.options.eps or 1e-6,
        )
        return {"normed": normed}


KERNELS = {"gate": Gate, "l2norm": L2Norm, "norm": Norm}
