"""vLLM's operations around the rule: `vllm.gate`, `.l2norm`, `.norm` and, from 0.20, `vllm.post-conv`.

The idea: each is called as vLLM's layer calls it. The gating kernel of the first generation stands in the
layer's own file, which imports the whole engine; its two definitions are taken out of the file by name and
run as they stand, nothing else of it is.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...capture.errors import CannotRun, Refused
from .. import autotune
from ..contract import Contract
from ..interface import KernelCall
from ..vllm_kernel import VllmKernel
from .adapter import OpAdapter
from .contracts import contract_of_op
from .fla import INTERPRETED

LAYER_FILES = ("vllm/model_executor/layers/mamba/gdn_linear_attn.py",)
GATING = ("fused_gdn_gating_kernel", "fused_gdn_gating")


def definitions(path: Path, names: Sequence[str], given: dict[str, Any]) -> dict[str, Any]:
    """Functions of a source file by name, without the file's imports or anything else of it.

    given: the globals that they may use. Triton finds their source where it stands. Raises CannotRun where
    one is not defined there.
    """
    tree = ast.parse(path.read_text(), filename=str(path))
    chosen = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    missing = sorted(set(names) - {node.name for node in chosen})
    if missing:
        raise CannotRun(f"{path.name} defines no {', '.join(missing)}")
    space = {"__name__": f"gdncheck_part_of.{path.stem}", "__file__": str(path), **given}
    future = ast.parse("from __future__ import annotations").body
    module = ast.Module(body=[*future, *chosen], type_ignores=[])
    exec(compile(ast.fix_missing_locations(module), str(path), "exec"), space)
    return {name: space[name] for name in names}


class _VllmOp(VllmKernel, OpAdapter):
    family = "vllm"
    package = "vllm"  # type: ignore[misc]
    capabilities = INTERPRETED  # type: ignore[misc]
    submodule = "l2norm"

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        with autotune.pinned(call.options.pins) as launched:
            outputs = OpAdapter.run(self, call)
        self.evidence["launched"] = dict(launched)
        return outputs

    @classmethod
    def contract_for(cls, version: str | None) -> Contract:
        return contract_of_op("vllm", cls.op, version)

    def facts(self) -> dict[str, Any]:
        return {"backend": "triton", "interpreted": self.interpreted, "kernels": self.folder}


class Gate(_VllmOp):
    """`fused_gdn_gating` of the layer's file (before 0.20.0): g in float32, beta in the dtype of b."""

    op, read = "gate", "b"  # type: ignore[misc]

    def __init__(self, version: str | None = None) -> None:
        """Raises CannotRun where the layer's file is not here, or holds no gating."""
        super().__init__(version)
        import triton
        import triton.language as tl

        found = [self.root / name for name in LAYER_FILES if (self.root / name).is_file()]
        if not found:
            other = (
                "vllm.post-conv makes the gate in this version"
                if self.second_generation
                else "it is not among the kept kernel files: name a source tree, vllm.gate@path:DIR, "
                "or in a chain gate=emulation.gate"
            )
            raise CannotRun(f"vllm.gate: {LAYER_FILES[0]} is not there; {other}")
        parts = definitions(found[0], GATING, {"torch": torch, "triton": triton, "tl": tl})
        self.function = parts["fused_gdn_gating"]

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        t = call.tensors
        g, beta = self.function(t["A_log"], t["a"].contiguous(), t["b"].contiguous(), t["dt_bias"])
        return {"g": g[0], "beta": beta[0]}


class L2Norm(_VllmOp):
    """`l2norm_fwd` on q and on k."""

    op, read = "l2norm", "q"  # type: ignore[misc]

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        return {name: self.module.l2norm_fwd(call.tensors[name].contiguous()) for name in ("q", "k")}


class Norm(_VllmOp):
    """`rmsnorm_fn`, what RMSNormGated runs on a GPU: norm, weight, then SiLU of z."""

    op, read, submodule = "norm", "core_output", "layernorm_guard"  # type: ignore[misc]

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        t = call.tensors
        size = t["core_output"].shape[-1]
        normed = self.module.rmsnorm_fn(
            t["core_output"].reshape(-1, size).contiguous(),
            t["norm_weight"],
            None,
            z=t["z"].reshape(-1, size).contiguous(),
            eps=call.options.eps or 1e-6,
            group_size=None,
            norm_before_gate=True,
        )
        return {"normed": normed.view_as(t["core_output"])}


class PostConv(_VllmOp):
    """`fused_post_conv_prep`: split, l2norm and gate in one kernel, as prefill runs it from 0.20.0 on."""

    op, read, submodule = "post-conv", "conv_output", "fused_gdn_prefill_post_conv"  # type: ignore[misc]

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        t, heads = call.tensors, call.options.heads
        if heads is None:
            raise Refused("vllm.post-conv must be told the heads (HK, K, HV, V)")
        found = self.module.fused_post_conv_prep(
            conv_output=t["conv_output"].contiguous(),
            a=t["a"].contiguous(),
            b=t["b"].contiguous(),
            A_log=t["A_log"],
            dt_bias=t["dt_bias"],
            num_k_heads=heads[0],
            head_k_dim=heads[1],
            head_v_dim=heads[3],
            apply_l2norm=True,
            output_g_exp=False,
        )
        return dict(zip(("q", "k", "v", "g", "beta"), found, strict=True))


KERNELS = {"gate": Gate, "l2norm": L2Norm, "norm": Norm, "post-conv": PostConv}
