"""l2norm in float64: x / sqrt(sum(x^2) + eps), eps inside the root (shared design, section 3).

The one idea: the sum of squares must not leave float64's range before the root brings it back, so a
row whose largest entry is extreme is scaled by a power of two, which rounds nothing. What a NaN or an
infinity does is what the formula does with it. Which tensors are normalised is the caller's matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Squares of entries between these sum without overflow, and underflow only far below any eps in use.
SMALLEST_PLAIN = 2.0**-400
LARGEST_PLAIN = 2.0**400


def scaled_rows(x: Tensor, eps: float) -> tuple[Tensor, Tensor | float]:
    """Rows of x [..., D] brought into squaring range, and eps to match (a number or [..., 1]).

    Returns (x * 2^-e, eps * 2^-2e) with e = 0 for ordinary rows, so that
    (x * 2^-e) / sqrt(mean or sum of (x * 2^-e)^2 + eps * 2^-2e) is x / sqrt(... x^2 + eps).
    """
    if x.shape[-1] == 0 or x.numel() == 0:
        return x, eps
    largest = x.abs().amax(-1, keepdim=True)
    extreme = (largest > LARGEST_PLAIN) | ((largest < SMALLEST_PLAIN) & (largest > 0) & (eps == 0.0))
    extreme &= largest.isfinite()
    if not bool(extreme.any()):
        return x, eps
    exponent = torch.where(extreme, torch.frexp(largest).exponent, 0)
    # Two steps: 2^-1074 has no finite reciprocal.
    half = exponent.div(2, rounding_mode="floor")
    rest = exponent - half
    one = torch.ones_like(largest)
    first, second = (torch.ldexp(one, -part) for part in (half, rest))
    # Factor by factor: an eps of 0 must stay 0 where the square of the whole factor overflows.
    return x * first * second, eps * first * first * second * second


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension.

    x: [..., D], any dtype and device. Returns float64 of the same shape. A row of zeros gives zeros
    (NaN where eps is 0); an infinite entry gives NaN in its place and zeros beside it.
    """
    rows, eps_rows = scaled_rows(x.to(torch.float64), eps)
    return rows / (rows.square().sum(-1, keepdim=True) + eps_rows).sqrt()
