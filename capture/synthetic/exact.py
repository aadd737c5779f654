"""The exact family: cases in which a sound chunk kernel must agree with the truth bit for bit.

The idea (numerics.md, tier 0): with one-hot keys, beta in {0, 1}, g = 0 or a total reset, small integers
in v and in the state and a power of two as scale, every intermediate is a small integer. Each row of v and
of the state is random enough to name its token, so a wrong integer names what was read in its place
(`reference.exact` decodes it, and asserts representability).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .family import Family, Inputs, Shape
from .portable import Draw

RESET = -1024.0  # exp(-1024) is 0 in float32 and float64, and its sums are exact in every dtype
RESET_RATE = 1 / 40
KEY_REPEATS, KEY_WINDOW = 8, 128  # more repeats with beta 1 drive the powers of A out of range
RAW_LENGTH = {256: 2.0**20, 2048: 2.0**14, 1 << 24: 2.0**20}
"""Key length of `exact-raw` by largest exact integer: x / sqrt(x^2 + 1e-6) is exactly 1 in float32."""


def key_indices(shape: Shape, draw: Draw) -> Tensor:
    """Hot channel of each token's key, [T, HK] int64; -1 (a zero key) where every channel is used up.

    No channel occurs more than KEY_REPEATS times among any KEY_WINDOW consecutive tokens of a sequence.
    Low channels are preferred, so repeats do occur.
    """
    wish = draw.uniform("k", shape.n_tokens, shape.k_heads)
    wanted: list[list[int]] = torch.floor(wish * wish * shape.key_dim).long().tolist()
    chosen = torch.full((shape.n_tokens, shape.k_heads), -1)
    for start, length in shape.spans:
        for head in range(shape.k_heads):
            row = _deal([wanted[start + t][head] for t in range(length)], shape.key_dim)
            chosen[start : start + length, head] = torch.tensor(row, dtype=torch.int64)
    return chosen


def _deal(wish: list[int], n_channels: int) -> list[int]:
    count = [0] * n_channels
    row: list[int] = []
    for token, channel in enumerate(wish):
        if token >= KEY_WINDOW and row[token - KEY_WINDOW] >= 0:
            count[row[token - KEY_WINDOW]] -= 1
        candidates = ((channel + step) % n_channels for step in range(n_channels))
        free = next((c for c in candidates if count[c] < KEY_REPEATS), -1)
        if free >= 0:
            count[free] += 1
        row.append(free)
    return row


def query_indices(shape: Shape, draw: Draw, keys: Tensor) -> Tensor:
    """Hot channel of each token's query, [T, HK]: mostly the key of an earlier token of its sequence."""
    pick = draw.uniform("q.token", *keys.shape)
    anything = draw.integers("q.any", *keys.shape, low=0, high=shape.key_dim - 1)
    chosen = anything.clone()
    for start, length in shape.spans:
        for head in range(shape.k_heads if length else 0):
            past = torch.floor(pick[start : start + length, head] * torch.arange(1, length + 1)).long()
            chosen[start : start + length, head] = keys[start : start + length, head][past]
    chosen = torch.where(draw.uniform("q.kind", *keys.shape) < 0.7, chosen, anything)
    return torch.where(chosen >= 0, chosen, anything)


def one_hot(index: Tensor, width: int) -> Tensor:
    """[...] int64 -> [..., width] float64; -1 gives a zero row."""
    return (index.unsqueeze(-1) == torch.arange(width)).double()


def exact(shape: Shape, draw: Draw) -> Inputs:
    keys = key_indices(shape, draw)
    queries = query_indices(shape, draw, keys)
    # u and v_new reach twice the code, which must still be an exact integer of the dtype.
    largest = min(100, shape.largest_integer // 2)
    code = draw.integers("v", *shape.values, low=1, high=largest).double() * draw.signs(
        "v.sign", *shape.values
    )
    state = draw.integers("state", *shape.states, low=-largest, high=largest).double()
    reset = draw.uniform("g", *shape.gates) < RESET_RATE
    reset[:, ::2] = False  # even heads never forget: leaks from far away stay visible there
    sign = draw.signs("q.sign", *queries.shape).unsqueeze(-1)
    return Inputs(
        q=one_hot(queries, shape.key_dim) * sign,
        k=one_hot(keys, shape.key_dim),
        v=code,
        g=torch.where(reset, RESET, 0.0).double(),
        beta=(draw.uniform("beta", *shape.gates) < 0.75).double(),
        state=state,
        scale=scale_of(shape.key_dim),
    )


def exact_raw(shape: Shape, draw: Draw) -> Inputs:
    drawn = exact(shape, draw)
    length = RAW_LENGTH[shape.largest_integer]
    return drawn._replace(q=drawn.q * length, k=drawn.k * length, qk="raw")


def scale_of(key_dim: int) -> float:
    """The power of two at or just above K**-0.5."""
    return 2.0 ** -((key_dim.bit_length() - 1) // 2)


FAMILIES = {
    "exact": Family(
        "kernel and truth must agree bit for bit (tier 0)",
        "one-hot (zero where a channel was used 8 times in 128 tokens); q one-hot with a sign",
        "0; in odd heads -1024 (a total reset) once in 40 tokens",
        "0 or 1 (three in four)",
        exact,
    ),
    "exact-raw": Family(
        "the exact family before l2norm: also the norm must be exact",
        "one-hot times 2^20 (2^14 in fp16), flagged raw",
        "as exact",
        "0 or 1 (three in four)",
        exact_raw,
    ),
}
