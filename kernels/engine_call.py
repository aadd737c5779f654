"""What every adapter of a serving engine does with a call before its kernel sees it.

The idea: an engine's kernel takes one shape of the rule. Whatever else a call asks for is refused in one
line before it runs, so that a wrong result never comes from an option that was quietly ignored.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..capture.errors import Refused
from .contract import Capabilities
from .interface import KernelCall

L2NORM_EPS = 1e-6  # inside the root; the engines' own value before the rule


def check_rule_call(name: str, call: KernelCall, capabilities: Capabilities) -> None:
    """Raise Refused for a call of the rule that the kernel cannot take as asked."""
    tensors, options = call.tensors, call.options
    q, v, g = tensors["q"], tensors["v"], tensors["g"]
    if v.shape[0] == 0:
        raise Refused(f"{name} is never called without a token")
    if v.shape[1] % q.shape[1]:
        raise Refused(f"{name}: {v.shape[1]} value heads are no multiple of {q.shape[1]} key heads")
    if g.ndim == 3 and not capabilities.channel_gate:
        raise Refused(f"{name} takes one gate per head, not one per key channel")
    dtype = str(q.dtype).removeprefix("torch.")
    if dtype not in capabilities.input_dtypes:
        raise Refused(f"{name} takes {' or '.join(capabilities.input_dtypes)} inputs, not {dtype}")
    size = options.chunk_size
    if size is not None and size not in (capabilities.default_chunk_size, *capabilities.chunk_sizes):
        fixed = capabilities.default_chunk_size
        raise Refused(f"{name} works in chunks of {fixed}" if fixed else f"{name} has no chunks")
    if options.state_dtype is not None and options.state_dtype not in capabilities.state_dtypes:
        kept = " or ".join(capabilities.state_dtypes)
        raise Refused(f"{name} keeps its state in {kept}, not {options.state_dtype}")


def prepared_qk(
    call: KernelCall, default: Literal["in_kernel", "before"], eps: float = L2NORM_EPS
) -> tuple[Tensor, Tensor, bool]:
    """(q, k, whether the kernel must l2-normalise them).

    default: where the engine does it; the call's option overrides. q and k that come normalised are
    passed on and the kernel's own l2norm stays off.
    """
    q, k = call.tensors["q"], call.tensors["k"]
    if call.options.qk == "normalised":
        return q, k, False
    if (call.options.l2norm or default) == "in_kernel":
        return q, k, True
    return normalised(q, eps), normalised(k, eps), False


def normalised(x: Tensor, eps: float = L2NORM_EPS) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, in float32, rounded to x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
