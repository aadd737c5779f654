"""Poisoned memory: what Python code allocates and does not fill holds NaN or huge values, not leftovers.

The idea: fresh memory is usually zero or a former tensor, so a kernel that reads a row nobody wrote looks
right most of the time. Each fresh buffer is filled and counted, and the count is the proof that the axis
was exercised.

Leaves to others: finding the buffers (`allocation`), memory around them (`guard`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

HUGE = 1e30  # finite in float32 and bfloat16; a square overflows, as a stale state of that size would


class Poison:
    """A handler of `allocation.fresh_buffers` that fills what it is given."""

    def __init__(self, kind: Literal["nan", "huge"]) -> None:
        self.kind = kind
        self.buffers = 0
        self.bytes = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        """Fill one fresh buffer; integers and bools get their largest value."""
        dtype = tensor.dtype
        if dtype.is_floating_point or dtype.is_complex:
            tensor.fill_(float("nan") if self.kind == "nan" else min(HUGE, torch.finfo(dtype).max))
        elif dtype == torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(dtype).max)
        self.buffers += 1
        self.bytes += tensor.numel() * tensor.element_size()
        return tensor

    def evidence(self) -> dict[str, Any]:
        return {"poison": self.kind, "poisoned_buffers": self.buffers, "poisoned_bytes": self.bytes}
