"""The inputs of a token: a function of the seed, its sequence and its position, and of nothing else.

The idea: a history may be cut down at will, and each token that is left keeps its bits. A draft's rejected
guess at a position is another token than the one that is decoded there later, so it has inputs of its own
(`wrong`). Values come from Philox, counted by (sequence, position), by sums and products only, so that they
are the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

# Decay per token of a head, log-uniform: some heads remember hundreds of tokens, some a dozen. A head that
# forgets at once would hide whose state it started from.
DECAY_RATES = (0.003, 0.1)
TAPS = 4


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Heads and dimensions of a layer, and the dtypes of what a call is given."""

    k_heads: int = 1
    v_heads: int = 2
    key_dim: int = 8
    value_dim: int = 8
    dtype: str = "float32"
    """Of q, k, v, beta and the conv's input; g is float32."""
    taps: int = TAPS
    """Width of the conv."""
    conv_channels: int | None = None
    """None: as many as the layer has; 0: no conv."""

    @property
    def channels(self) -> int:
        """Channels of the conv: q | k | v as in the layer."""
        if self.conv_channels is not None:
            return self.conv_channels
        return 2 * self.k_heads * self.key_dim + self.v_heads * self.value_dim


Place = tuple[int, int, bool]
"""(sequence, position, whether it is a rejected guess)."""


class TokenSource(Protocol):
    """Where a call's inputs come from."""

    @property
    def sizes(self) -> Sizes: ...

    @property
    def weight(self) -> Tensor:
        """[D, W] of the conv."""

    def rule(self, places: Sequence[Place]) -> dict[str, Tensor]:
        """q, k [T, HK, K], v [T, HV, V], g, beta [T, HV] of some tokens."""

    def conv(self, places: Sequence[Place]) -> Tensor:
        """[T, D] inputs of the conv."""

    def start(self, sequence: int) -> Tensor | None:
        """[HV, K, V] state that a sequence starts from; None: zero."""


class Drawn:
    """Random tokens."""

    def __init__(self, seed: int, sizes: Sizes) -> None:
        self.seed, self.sizes = seed, sizes
        low, high = (math.log(r) for r in DECAY_RATES)
        share = self._uniform((-1, 0, False), sizes.v_heads)
        self.rates = np.exp(low + (high - low) * share)
        self.weight = (
            torch.from_numpy(self._normal((-2, 0, False), sizes.channels * sizes.taps))
            .view(sizes.channels, sizes.taps)
            .to(getattr(torch, sizes.dtype))
        )
        """[D, W] of the conv."""
        self._kept: dict[Place, tuple[np.ndarray, ...]] = {}

    def start(self, sequence: int) -> Tensor | None:
        return None

    def rule(self, places: Sequence[Place]) -> dict[str, Tensor]:
        x, dtype = self.sizes, getattr(torch, self.sizes.dtype)
        drawn = [self._token(place) for place in places]
        shapes = {
            "q": (x.k_heads, x.key_dim), "k": (x.k_heads, x.key_dim), "v": (x.v_heads, x.value_dim),
            "g": (x.v_heads,), "beta": (x.v_heads,),
        }  # fmt: skip
        found = {}
        for i, (name, shape) in enumerate(shapes.items()):
            rows = np.stack([token[i] for token in drawn]) if drawn else np.zeros((0, math.prod(shape)))
            kept = torch.float32 if name == "g" else dtype
            found[name] = torch.from_numpy(rows).reshape(len(drawn), *shape).to(kept)
        return found

    def conv(self, places: Sequence[Place]) -> Tensor:
        rows = [self._token(place)[5] for place in places]
        joined = np.stack(rows) if rows else np.zeros((0, self.sizes.channels))
        return torch.from_numpy(joined).to(getattr(torch, self.sizes.dtype))

    def _token(self, place: Place) -> tuple[np.ndarray, ...]:
        """q, k, v, g, beta, conv input, flat, float64."""
        if place not in self._kept:
            if len(self._kept) > 4096:
                self._kept.clear()
            self._kept[place] = self._drawn(place)
        return self._kept[place]

    def _drawn(self, place: Place) -> tuple[np.ndarray, ...]:
        x = self.sizes
        keys, values = x.k_heads * x.key_dim, x.v_heads * x.value_dim
        normal = self._normal(place, 2 * keys + values + x.channels)
        q, k = (_unit(normal[i * keys : (i + 1) * keys].reshape(x.k_heads, x.key_dim)) for i in (0, 1))
        uniform = self._uniform(place, 2 * x.v_heads, more=1)
        g = -self.rates * (0.5 + uniform[: x.v_heads])
        beta = 0.1 + 0.8 * uniform[x.v_heads :]
        v = normal[2 * keys : 2 * keys + values]
        return q.ravel(), k.ravel(), v, g, beta, normal[2 * keys + values :]

    def _uniform(self, place: Place, count: int, more: int = 0) -> np.ndarray:
        """In [0, 1), 53 bits each."""
        sequence, position, wrong = place
        counter = [position, sequence & 0xFFFFFFFF, 2 * int(wrong) + more, 0]
        # The counter's lowest word counts blocks, so the place goes into the higher ones.
        dice = np.random.Philox(key=self.seed & 0xFFFFFFFFFFFFFFFF, counter=[0, *counter[:3]])
        bits: np.ndarray = dice.random_raw(count) >> np.uint64(11)
        return np.asarray(bits.astype(np.float64) * 2.0**-53)

    def _normal(self, place: Place, count: int) -> np.ndarray:
        """Nearly normal, variance 1: the sum of four uniforms."""
        parts = self._uniform(place, 4 * count).reshape(4, count)
        return np.asarray((parts[0] + parts[1] + parts[2] + parts[3] - 2.0) * math.sqrt(3.0))


def _unit(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.sqrt((rows * rows).sum(-1, keepdims=True) + 1e-6))
