"""The layer's gates in float64: g = -exp(A_log) * softplus(a + dt_bias), beta = sigmoid(b).

The one idea: both functions are written so that no argument overflows on the way to a representable
result; torch's own softplus turns linear above 20 and its sigmoid drops results below 1e-308, and both
would show as differences that no kernel made. Linear decay is exp(g); g is natural log throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), float64; exact limits 0 and x at the ends, NaN for NaN."""
    x = x.to(torch.float64)
    return x.clamp_min(0.0) + torch.log1p(torch.exp(-x.abs()))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), float64, down to the smallest subnormal; 0 and 1 at the infinities."""
    x = x.to(torch.float64)
    small = torch.exp(-x.abs())
    return torch.where(x >= 0, 1.0, small) / (1.0 + small)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), float64. At -inf it is NaN, as the product and torch's own SiLU have it."""
    x = x.to(torch.float64)
    return x * sigmoid(x)


def gate(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay and write strength from the raw projections.

    a, b: [T, HV]; A_log, dt_bias: [HV]; any dtype and device.
    Returns (g [T, HV] natural log, <= 0 for finite inputs; beta [T, HV] in [0, 1]), float64.
    """
    g = -torch.exp(A_log.to(torch.float64)) * softplus(a.to(torch.float64) + dt_bias.to(torch.float64))
    return g, sigmoid(b)
