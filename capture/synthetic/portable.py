"""Random numbers and elementary functions that are the same, bit for bit, on every machine.

The idea: a seed names a case only if every machine draws the same tensors from it. So draws come from
the CPU generator's 53-bit uniforms, and all else is made of float64 + - * / sqrt, which IEEE 754 rounds
correctly everywhere, in elementwise steps; torch.exp, randn, sums and matrix products differ between
builds in the last bit and are not used. Families build on these; nothing here knows about them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 1 << 14  # elements per step: temporaries stay in cache, and torch starts no threads for them
LN2_HIGH = 0.693147180369123816490  # ln 2 cut to 32 bits, so that n * LN2_HIGH is exact
LN2_LOW = 1.90821492927058770002e-10
# Terms of each series: relative error below 1e-12, far under a float32's half ulp.
EXP_SERIES = [1.0 / math.factorial(n) for n in range(11)]
LOG_SERIES = [2.0 / (2 * n + 1) for n in range(8)]
LEVELS = 1 << 14
CDF_TERMS, NEWTON_STEPS = 60, 24
EXPONENT_BIAS = 1023
MANTISSA_BITS = 52


class Draw:
    """A source of named random streams; the stream `k` does not depend on what was drawn for `v`."""

    def __init__(self, family: str, seed: int) -> None:
        self.family, self.seed = family, seed
        self._streams: dict[str, torch.Generator] = {}

    def uniform(self, name: str, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Uniform in [low, high), float64."""
        u = torch.rand(shape, generator=self._stream(name), dtype=torch.float64)
        return u * (high - low) + low

    def normal(self, name: str, *shape: int) -> Tensor:
        """Standard normal in LEVELS equally likely steps, float64; the largest magnitude is 4.0."""
        return self._pick(name, shape, normal_levels())

    def silu_of_normal(self, name: str, *shape: int) -> Tensor:
        """SiLU of a standard normal, float64: what a conv with SiLU hands on; in -0.28..4."""
        return self._pick(name, shape, silu(normal_levels()))

    def _pick(self, name: str, shape: tuple[int, ...], levels: Tensor) -> Tensor:
        index = self.integers(name, math.prod(shape), low=0, high=LEVELS - 1)
        return levels[index].reshape(shape)

    def integers(self, name: str, *shape: int, low: int, high: int) -> Tensor:
        """Integers low..high, both included, int64."""
        return torch.floor(self.uniform(name, *shape) * (high - low + 1)).long() + low

    def signs(self, name: str, *shape: int) -> Tensor:
        """-1 or 1, float64."""
        return torch.where(self.uniform(name, *shape) < 0.5, -1.0, 1.0).double()

    def _stream(self, name: str) -> torch.Generator:
        if name not in self._streams:
            digest = hashlib.sha256(f"{self.family}\n{self.seed}\n{name}".encode()).digest()
            generator = torch.Generator(device="cpu")
            generator.manual_seed(int.from_bytes(digest[:4], "little"))  # the twister takes 32 bits
            self._streams[name] = generator
        return self._streams[name]


def exp(x: Tensor) -> Tensor:
    """e^x, float64, to 1e-12 for -700 <= x <= 700; exactly 0 below."""
    return _join(_blocked(_exp, x.reshape(-1)), x)


def log(x: Tensor) -> Tensor:
    """Natural log of positive normal x, float64, to 1e-12."""
    return _join(_blocked(_log, x.reshape(-1)), x)


def sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + exp(-x))


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)."""
    return x.clamp(min=0) + log(1.0 + exp(-x.abs()))


def total(x: Tensor) -> Tensor:
    """Sum over the last axis, kept as size 1, by halving: one fixed order of additions everywhere."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat((folded, x[..., 2 * half :]), dim=-1) if x.shape[-1] % 2 else folded
    return x


def unit(x: Tensor) -> Tensor:
    """Rows of length 1 along the last axis, float64; a zero row stays zero."""
    norm = torch.sqrt(total(x * x))
    return x / torch.where(norm > 0, norm, torch.ones_like(norm))


@lru_cache(maxsize=1)
def normal_levels() -> Tensor:
    """The standard normal's quantiles at (i + 1/2) / LEVELS, [LEVELS], by Newton's method from 0.

    CDF: 1/2 + density(x) * (x + x^3/3 + x^5/(3*5) + ...); concave above 0, so steps never overshoot.
    """
    p = (torch.arange(LEVELS // 2, dtype=torch.float64) + 0.5) / LEVELS
    x = torch.zeros_like(p)
    for _ in range(NEWTON_STEPS):
        density = exp(x * x * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))
        term = x.clone()
        area = x.clone()
        for n in range(1, CDF_TERMS):
            term = term * x * x / (2 * n + 1)
            area = area + term
        x = x + (p - density * area) / density
    return torch.cat((-x.flip(0), x))


def _blocked(function: Callable[..., Tensor], *flat: Tensor) -> list[Tensor]:
    count = flat[0].shape[0]
    return [function(*(f[s : s + BLOCK] for f in flat)) for s in range(0, count, BLOCK)] or [flat[0].clone()]


def _join(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(parts).reshape(like.shape)


def _exp(x: Tensor) -> Tensor:
    bounded = x.clamp(-700.0, 700.0)
    n = torch.floor(bounded * (1.0 / math.log(2)) + 0.5)
    r = (bounded - n * LN2_HIGH) - n * LN2_LOW
    power = ((n.long() + EXPONENT_BIAS) << MANTISSA_BITS).view(torch.float64)
    return (_horner(EXP_SERIES, r) * power).masked_fill_(x < -700.0, 0.0)


def _log(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int64)
    exponent = (bits >> MANTISSA_BITS) - EXPONENT_BIAS
    mantissa = ((bits & ((1 << MANTISSA_BITS) - 1)) | (EXPONENT_BIAS << MANTISSA_BITS)).view(torch.float64)
    high = mantissa > math.sqrt(2.0)
    mantissa = torch.where(high, mantissa * 0.5, mantissa)
    n = (exponent + high).double()
    s = (mantissa - 1.0) / (mantissa + 1.0)
    return n * LN2_HIGH + (s * _horner(LOG_SERIES, s * s) + n * LN2_LOW)


def _horner(series: list[float], x: Tensor) -> Tensor:
    """series[0] + series[1] x + ..., one rounding per step."""
    result = torch.full_like(x, series[-1])
    for coefficient in reversed(series[:-1]):
        result.mul_(x).add_(coefficient)
    return result
