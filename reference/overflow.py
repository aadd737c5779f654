"""Decay sums inside chunks: where a kernel that factors them overflows, and where float32 sums cancel.

The idea: both follow from G, the cumsum of g from a chunk's first token, and need no kernel to run.
A kernel that forms exp(G_i) * exp(-G_j) overflows once -G passes ln(float32 max) = 88.72, which is 128 in
the log2 units of kernels that use exp2. A float32 G that carries a huge gate has lost the digits of the
small ones after it. Whether that is a fault is the verdict's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

LIMIT = math.log(torch.finfo(torch.float32).max)  # 88.72; the same in log2 units is 128
CHUNK_SIZES = (16, 32, 64, 128)
FLOOR = -1e9  # stands for -inf in sums; far beyond LIMIT and far from float64's precision
FORGOTTEN = -20.0  # a decay below exp(-20) no longer matters in bf16 or fp16
# Relative error of exp(G_i - G_j) that is worth a word, by dtype: a quarter of its own rounding, and for
# float32 what tf32-free kernels are held to.
CANCELLATION = {torch.bfloat16: 2.0**-10, torch.float16: 2.0**-13, torch.float32: 2.0**-16}


@dataclass(frozen=True)
class OverflowPrediction:
    """Where exp(-G) first leaves float32."""

    chunk_size: int | None
    """Smallest chunk size that overflows; None: none of those asked for."""
    row: int | None = None
    """Packed row of the first token where it does, at that chunk size."""
    head: int | None = None
    decay_sum: float | None = None
    """-G there, natural log units."""
    largest: dict[int, float] = field(default_factory=dict)
    """Largest |G| in any chunk, by chunk size."""


def chunk_sums(g: Tensor, cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """G of each token, float64 [T, HV] (the most decayed channel for g [T, HV, K]); -inf counts as -1e9."""
    per_head = g.double() if g.dim() == 2 else g.double().amin(-1)
    bounded = per_head.clamp(min=FLOOR).nan_to_num(nan=0.0, posinf=-FLOOR)
    # Subtracting a global prefix would cost digits behind a huge gate: sum each chunk by itself.
    rows = torch.arange(len(bounded), device=g.device)
    starts = cu_seqlens.to(g.device)
    sequence = torch.searchsorted(starts, rows, right=True) - 1
    position = (rows - starts[sequence]) % chunk_size
    sums = bounded.clone()
    step = 1
    while step < chunk_size:
        shifted = torch.zeros_like(sums)
        shifted[step:] = sums[:-step]
        sums = sums + torch.where((position >= step).unsqueeze(-1), shifted, 0.0)
        step *= 2
    return sums


def predict_overflow(
    g: Tensor, cu_seqlens: Tensor, chunk_sizes: tuple[int, ...] = CHUNK_SIZES
) -> OverflowPrediction:
    """The smallest chunk size at which a kernel that factors exp(G_i) exp(-G_j) overflows float32.

    g: [T, HV] or [T, HV, K], natural log. cu_seqlens: [N+1].
    """
    found: tuple[int, int, int, float] | None = None
    largest: dict[int, float] = {}
    for size in sorted(chunk_sizes):
        sums = chunk_sums(g, cu_seqlens, size)
        largest[size] = float(sums.abs().max()) if sums.numel() else 0.0
        if found is None and largest[size] > LIMIT:
            row, head = (int(i) for i in (sums.abs() > LIMIT).nonzero()[0])
            found = size, row, head, -float(sums[row, head])
    if found is None:
        return OverflowPrediction(None, largest=largest)
    return OverflowPrediction(*found, largest=largest)


def cancelled(
    g: Tensor, cu_seqlens: Tensor, dtype: torch.dtype, chunk_size: int = 64
) -> tuple[int, int, float] | None:
    """(packed row, head, error of log decay) of the first gate that a float32 G swallows, or None.

    The decay of one step is G_t - G_{t-1}; the error is how far a float32 G is from g_t there. Only steps
    that still remember something (g_t above FORGOTTEN) count, and errors above CANCELLATION[dtype].
    """
    sums = chunk_sums(g, cu_seqlens, chunk_size)
    if len(sums) < 2:
        return None
    rounded = sums.clamp(min=-3e38).float().double()
    rows = torch.arange(len(sums), device=g.device)
    starts = cu_seqlens.to(g.device)
    inside = (rows - starts[torch.searchsorted(starts, rows, right=True) - 1]) % chunk_size > 0
    step = rounded[1:] - rounded[:-1]
    exact = sums[1:] - sums[:-1]
    error = (step - exact).abs()
    counts = inside[1:, None] & (exact > FORGOTTEN) & (error > CANCELLATION.get(dtype, 2.0**-16))
    if not bool(counts.any()):
        return None
    row, head = (int(i) for i in counts.nonzero()[0])
    return row + 1, head, float(error[row, head])
