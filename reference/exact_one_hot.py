"""Exactness by proof, for one-hot keys: no number needs to be formed to know that none is rounded.

Statement. Let every key be zero or one-hot (value 1), every query zero or one-hot up to its sign, beta 0
or 1, gates 0 or a total reset by an integer, v and the starting state integers of at most L, the scale 2^-m,
and let no channel be used more than R = 8 times among any C consecutive tokens of a sequence. Then with
beta = 1 a token replaces its channel's row of the state by its value, so within a chunk of at most C tokens:
- kkt has entries 0 and 1, and couples at most R tokens; (I + A)^-1 has entries 0, 1 and -1 (a token undoes
  the one before it in its channel), and w = T beta k exp(G) as well;
- a power of A counts paths between R tokens, and a partial product of the doubling is at most
  2^(R - 1) = 128 in sum of magnitudes;
- |u|, |v_new| <= 2 L, |S| <= L, and a partial sum of any dot product is at most (2 R + 1) L;
- |o| <= L before the scale, which only moves its exponent.
All are integers, so they are exact wherever 2 L and 128 are, in the operands' format, L is in the state's,
and (2 R + 1) L is in float32 (24 bits).

`exact` asks this first and forms every number where it does not apply.
"""

from __future__ import annotations

import torch
from torch import Tensor

REPEATS = 8
# Largest integer up to which all are exact; an operand of a float32 dot may be cut to tf32.
LARGEST = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**11, torch.float64: 2**53}
STORED = {**LARGEST, torch.float32: 2**24}
PRODUCTS = 2 ** (REPEATS - 1)
# A scaled output must not fall under the formats' normal numbers: fp16 has them from 2^-14 on.
SMALLEST_SCALE = 2.0**-12


def is_proven(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    bounds: list[int],
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    largest_chunk: int,
) -> bool:
    """Whether the statement above covers this case. Shapes as in `exact.is_exact`; q, k already normalised.

    bounds: [N + 1] starts of the sequences; largest_chunk: C. That gates, beta, v, states and the scale are
    what the statement says, up to magnitudes, has been checked before (`exact`).
    """
    if bool((g != g.round()).any()) or _magnitude(g) * largest_chunk > 2**24:
        return False  # a sum of gates might round
    if dtype not in LARGEST or state_dtype not in STORED or not SMALLEST_SCALE <= abs(scale) <= 1:
        return False
    if not _one_hot(k, signed=False) or not _one_hot(q, signed=True):
        return False
    if bool(((beta != 0) & (beta != 1)).any()):
        return False
    largest = max(_magnitude(v), 0 if initial_state is None else _magnitude(initial_state))
    if max(2 * largest, PRODUCTS) > LARGEST[dtype] or largest > STORED[state_dtype]:
        return False
    if (2 * REPEATS + 1) * largest > 2**24:
        return False
    return _seldom(k, bounds, largest_chunk)


def _one_hot(x: Tensor, *, signed: bool) -> bool:
    size = x.abs() if signed else x
    return bool(((size == 0) | (size == 1)).all()) and bool(((x != 0).sum(-1) <= 1).all())


def _magnitude(x: Tensor) -> int:
    return int(x.abs().max()) if x.numel() else 0


def _seldom(k: Tensor, bounds: list[int], within: int) -> bool:
    """No channel of k [T, HK, K] is used more than REPEATS times among `within` tokens of a sequence."""
    token, head, channel = (k != 0).nonzero(as_tuple=True)
    starts = torch.tensor(bounds[1:], device=k.device)
    sequence = torch.searchsorted(starts, token, right=True)
    group = (sequence * k.shape[1] + head) * k.shape[2] + channel
    order = (group * (len(k) + 1) + token).argsort()
    group, token = group[order], token[order]
    again = group[REPEATS:] == group[:-REPEATS]
    return not bool((again & (token[REPEATS:] - token[:-REPEATS] < within)).any())
