"""The gated RMSNorm that closes a GDN layer, in float64.

The one idea: norm first, then weight, then gate: x / sqrt(mean(x^2) + eps) * weight * silu(z). The
weight multiplies as it is stored (the model's other RMSNorms store it less one; this one does not).
Source of the order: Qwen3NextRMSNormGated in transformers, whose roundings are left to the emulation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .gate import silu
from .l2norm import scaled_rows


def gated_rms_norm(x: Tensor, z: Tensor | None, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalise each head's row, weight it, gate it.

    x, z: [..., V]; z None leaves the gate out. weight: [V]. Any dtype and device.
    Returns float64 [..., V].
    """
    rows, eps_rows = scaled_rows(x.to(torch.float64), eps)
    normed = rows / (rows.square().mean(-1, keepdim=True) + eps_rows).sqrt()
    weighted = normed * weight.to(torch.float64)
    return weighted if z is None else weighted * silu(z)
