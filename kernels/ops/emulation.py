"""`emulation.gate`, `.l2norm`, `.norm`, `.conv`, `.split`: each operation by its honest emulation.

The idea: as `emulation.chunk` for the rule, the same code that measures what is honest, as a kernel that
can be named: a sound twin for planted faults, and the layer's own torch line where a family has no kernel
for an operation (`split`).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ...capture.errors import Refused
from ...reference.conv import causal_conv
from ...reference.emulation_ops import (
    OpRounding,
    emulate_conv,
    emulate_gate,
    emulate_l2norm,
    emulate_norm,
)
from ...reference.op_functions import L2Norm, Norm
from ..interface import KernelCall
from .adapter import OpAdapter
from .conv_state import starting_conv_state, with_conv_pool


class _Emulated(OpAdapter):
    family: ClassVar[str] = "emulation"


class Gate(_Emulated):
    """g in float32, beta in the dtype of b, each rounded once."""

    op, read = "gate", "a"

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        t = call.tensors
        g, beta = emulate_gate(t["a"], t["b"], t["A_log"], t["dt_bias"], OpRounding())
        return {"g": g, "beta": beta.to(t["b"].dtype)}


class L2NormOp(_Emulated):
    """q and k normalised in float32, rounded once to their dtype."""

    op, read = "l2norm", "q"

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        function = L2Norm(eps=call.options.eps or L2Norm.eps)
        return {
            name: emulate_l2norm(call.tensors[name], OpRounding(), function).to(call.tensors[name].dtype)
            for name in ("q", "k")
        }


class NormOp(_Emulated):
    """The gated RMSNorm in float32, rounded once to the dtype of z."""

    op, read = "norm", "core_output"

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        t = call.tensors
        function = Norm(eps=call.options.eps or Norm.eps)
        normed = emulate_norm(t["core_output"], t["z"], t["norm_weight"], OpRounding(), function)
        return {"normed": normed.to(t["z"].dtype)}


class ConvOp(_Emulated):
    """The convolution in float32, rounded once to its input's dtype."""

    op, read = "conv", "conv_input"

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        t = call.tensors
        state = starting_conv_state(t)
        output = emulate_conv(
            t["conv_input"], t["conv_weight"], t.get("conv_bias"), state, t["cu_seqlens"], OpRounding()
        )
        _, final = causal_conv(t["conv_input"], t["conv_weight"], t.get("conv_bias"), state, t["cu_seqlens"])
        dtype = t["conv_input"].dtype if state is None else state.dtype
        return {"conv_output": output.to(t["conv_input"].dtype), **with_conv_pool(t, final.to(dtype))}


class Split(_Emulated):
    """The layer's own torch lines: channels in the order q|k|v, heads side by side."""

    op, read = "split", "conv_output"

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        return split(call.tensors["conv_output"], call.options.heads)


def split(conv_output: Tensor, heads: tuple[int, int, int, int] | None) -> dict[str, Tensor]:
    """[T, D] -> q, k [T, HK, K], v [T, HV, V]. heads: (HK, K, HV, V).

    Raises Refused where they do not fit.
    """
    if heads is None or 2 * heads[0] * heads[1] + heads[2] * heads[3] != conv_output.shape[1]:
        raise Refused(f"{conv_output.shape[1]} channels are not q|k|v of heads {heads} (HK, K, HV, V)")
    n_key, key_dim, n_value, value_dim = heads
    keys = n_key * key_dim
    q, k, v = torch.split(conv_output, [keys, keys, n_value * value_dim], dim=-1)
    return {
        "q": q.reshape(-1, n_key, key_dim).contiguous(),
        "k": k.reshape(-1, n_key, key_dim).contiguous(),
        "v": v.reshape(-1, n_value, value_dim).contiguous(),
    }


KERNELS = {"gate": Gate, "l2norm": L2NormOp, "norm": NormOp, "conv": ConvOp, "split": Split}
