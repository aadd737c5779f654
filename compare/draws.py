"""Draws: how many independent roundings make the error of a tile.

The idea: the RMS over many independent roundings is nearly the same in every sound run, over three it is
luck; so limits widen with few draws. A row of an output is one draw (its entries share roundings of k, beta,
a dot product) and so are 16 of its entries. A state is not as many draws as it has entries: its error is a
sum of k_t du_t^T over the tokens that it remembers, one in the extreme, and the participation ratio of the
error's singular values counts them. How limits widen is the checks' business.
"""

from __future__ import annotations

import torch
from torch import Tensor

ENTRIES_PER_DRAW = 16
PROBES = 16
PROBE_SEED = 20_605


def draws_of_rows(rows: Tensor, entries: Tensor) -> Tensor:
    """Draws of pools of rows with so many entries in all, float64."""
    return rows + entries.double() / ENTRIES_PER_DRAW


def draws_of_states(error: Tensor) -> Tensor:
    """[R, H] draws of each matrix of an error [R, H, K, V]: 1 + V per direction, capped by entries.

    Every entry of u is rounded by itself. Measured in 16-bit dtypes on sequences of 1 to 16 tokens: sound
    kernels that declare their rounding stay within 1.11 times the yardstick.
    """
    n_keys, n_values = error.shape[-2:]
    return (participation(error) * (1 + n_values)).clamp(max=1 + n_keys * n_values / ENTRIES_PER_DRAW)


def participation(error: Tensor) -> Tensor:
    """(sum s^2)^2 / sum s^4 over the singular values s of [R, H, K, V]: 1 for a single direction.

    sum s^4 = |E^T E|_F^2 is estimated by random signs x, E |E^T E x|^2 = |E^T E|_F^2. A zero matrix gives 1.
    """
    n_keys, n_values = error.shape[-2:]
    most = float(max(1, min(n_keys, n_values)))
    size = torch.linalg.vector_norm(error.flatten(2), dim=-1)[..., None, None]
    unit = torch.where(torch.isfinite(error) & (size > 0), error / size, 0.0)
    dice = torch.Generator().manual_seed(PROBE_SEED)
    signs = torch.randint(0, 2, (n_values, PROBES), generator=dice).to(error) * 2 - 1
    back = unit.mT @ (unit @ signs)
    fourth = back.square().sum(-2).mean(-1)
    return torch.where(fourth > 0, 1 / fourth, 1.0).clamp(1.0, most)
