"""Decay between two tokens of a chunk, without losing digits to a long sum.

The one idea: the decay from token j to token i is exp(G_i - G_j), G the running sum of g in the chunk,
and a float64 G that has passed a huge gate has no digits left for the small ones after it. So each g is
split into a multiple of 2^-30, whose running sums and their differences are exact, and a remainder
below 2^-31 whose sums stay small. A gate below -2000 counts as -2000: exp of either is exactly zero, and
so is every decay across it, which makes g = -inf a reset of that head without any case of its own
(0 * S, for a finite S).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# exp(x) is zero in float64 below -745.2, subnormals included.
RESET = -2000.0
GRAIN = 2.0**30
# 2000 * 2^30 * 2^11 < 2^53: up to here the coarse running sums are exact.
LARGEST_CHUNK = 2048


@dataclass(frozen=True)
class RunningDecay:
    """Running log decay of chunks, [..., C] per head or [..., C, K] per key channel, in two parts."""

    coarse: Tensor
    fine: Tensor
    channel: bool

    def from_start(self) -> Tensor:
        """exp(G_i): decay of the state at the chunk's start as token i sees it."""
        return torch.add(self.coarse, self.fine).exp_()

    def to_end(self) -> Tensor:
        """exp(G_last - G_j): decay of what token j writes until the end of the chunk."""
        at = -2 if self.channel else -1
        last = self.coarse.shape[at] - 1
        coarse = self.coarse.narrow(at, last, 1) - self.coarse
        return coarse.add_(self.fine.narrow(at, last, 1) - self.fine).exp_()

    def pairs(self) -> Tensor:
        """exp(G_i - G_j) for i >= j, zero elsewhere: [..., C, C]; per head only."""
        assert not self.channel
        between = self.coarse.unsqueeze(-1) - self.coarse.unsqueeze(-2)
        between += self.fine.unsqueeze(-1) - self.fine.unsqueeze(-2)
        # Above the diagonal exp may be inf; tril_ writes zeros there and multiplies nothing.
        return between.exp_().tril_()

    def pair_products(self, x: Tensor, y: Tensor) -> Tensor:
        """sum_c x_i[c] y_j[c] exp(G_i[c] - G_j[c]) for i >= j, zero elsewhere: [..., C, C]; per channel.

        x, y: [..., C, K], C a power of two. Rows of the second half of a block against columns of its
        first half share a reference between them, the first half's last token: both exponents,
        G_i - G_ref and G_ref - G_j, are sums of the gates in between, so neither overflows when g <= 0.
        """
        assert self.channel
        *lead, C, K = x.shape
        products = x.new_zeros((*lead, C, C))
        products.diagonal(dim1=-2, dim2=-1).copy_((x * y).sum(-1))
        half = 1
        while half < C:
            shape = (*lead, C // (2 * half), 2 * half, K)
            coarse, fine = self.coarse.view(shape), self.fine.view(shape)
            ref = slice(half - 1, half)
            late, early = slice(half, None), slice(None, half)
            coarse, fine = coarse - coarse[..., ref, :], fine - fine[..., ref, :]
            rows = coarse[..., late, :] + fine[..., late, :]
            columns = (coarse[..., early, :] + fine[..., early, :]).neg_()
            rows = rows.exp_().mul_(x.reshape(shape)[..., late, :])
            columns = columns.exp_().mul_(y.reshape(shape)[..., early, :])
            blocks = products.view(*lead, C // (2 * half), 2 * half, C // (2 * half), 2 * half)
            blocks = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # [..., blocks, 2 half, 2 half]
            blocks[..., late, early] = rows @ columns.mT
            half *= 2
        return products


def running_decay(g: Tensor, channel: bool) -> RunningDecay:
    """Running decay of g [..., C] or, per channel, [..., C, K]: float64 natural log, C <= 2048."""
    along = -2 if channel else -1
    bounded = g.clamp_min(RESET)
    coarse = (bounded * GRAIN).round_().div_(GRAIN)
    fine = bounded.sub_(coarse)
    return RunningDecay(coarse.cumsum(along), fine.cumsum(along), channel)
