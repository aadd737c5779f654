"""Rounding to the number formats that kernels keep their intermediates in.

The idea: a kernel's error is made at its casts, so an emulation needs every cast that a kernel can
make, on tensors that stay float32 (or float64) and merely hold values of the narrower format. Four
ways to round: to the nearest even (what compilers emit), to the nearest with ties away from zero
(`cvt.rna.tf32`), toward zero (a tensor core that ignores the low bits of a float32 operand), and
stochastically (to tell ill-conditioned data from a wrong kernel; never an honest stand-in for a kernel:
its RMS error is sqrt(2) times that of nearest).

Which cast point has which format is `precision`'s subject, not this module's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Mode = Literal["nearest-even", "nearest-away", "toward-zero", "stochastic"]
MODES: tuple[Mode, ...] = ("nearest-even", "nearest-away", "toward-zero", "stochastic")


@dataclass(frozen=True)
class Format:
    """A binary floating-point format with subnormals, infinities and NaN."""

    name: str
    significand_bits: int
    """Stored bits of the significand, without the implicit one."""
    min_exponent: int
    """Exponent of the smallest normal number."""
    max_exponent: int
    dtype: torch.dtype | None
    """The torch dtype that holds it, None for tf32 (kept in float32)."""

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding a normal number to nearest."""
        return 2.0 ** -(self.significand_bits + 1)

    @property
    def largest(self) -> float:
        """Largest finite number."""
        return (2.0 - 2.0**-self.significand_bits) * 2.0**self.max_exponent


FORMATS: dict[str, Format] = {
    "bf16": Format("bf16", 7, -126, 127, torch.bfloat16),
    "fp16": Format("fp16", 10, -14, 15, torch.float16),
    "tf32": Format("tf32", 10, -126, 127, None),
    "fp32": Format("fp32", 23, -126, 127, torch.float32),
    "fp64": Format("fp64", 52, -1022, 1023, torch.float64),
}

_NAMES: dict[torch.dtype, str] = {f.dtype: f.name for f in FORMATS.values() if f.dtype is not None}


def format_of(dtype: torch.dtype) -> str:
    """Name of the format that a torch dtype stores; ValueError for any other dtype."""
    if dtype not in _NAMES:
        raise ValueError(f"{dtype} is no format of the emulation; use one of {', '.join(map(str, _NAMES))}")
    return _NAMES[dtype]


def round_to(
    x: Tensor, fmt: str, mode: Mode = "nearest-even", generator: torch.Generator | None = None
) -> Tensor:
    """x with every entry rounded once to `fmt`, in x's own dtype.

    x: any shape, float32 or float64. A format that holds every value of x's dtype leaves x as it is.
    Overflow: to infinity from the midpoint above the largest finite number (both nearest modes, as a
    cast does), to the largest finite number toward zero. NaN and infinities are kept. From float64 the
    rounding is done in one step, where torch's own cast to bfloat16 rounds to float32 first.
    generator: for `stochastic` only; None draws from torch's default generator of the device.
    Raises ValueError for another dtype, an unknown format or an unknown mode.
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"round_to takes float32 or float64, not {x.dtype}; convert the tensor first")
    if fmt not in FORMATS:
        raise ValueError(f"unknown format {fmt!r}; known: {', '.join(FORMATS)}")
    if mode not in MODES:
        raise ValueError(f"unknown rounding mode {mode!r}; known: {', '.join(MODES)}")
    target = FORMATS[fmt]
    if target.significand_bits >= FORMATS[format_of(x.dtype)].significand_bits:
        return x
    single = x.dtype == torch.float32
    if mode == "nearest-even" and target.dtype is not None and (single or fmt == "fp32"):
        return x.to(target.dtype).to(x.dtype)
    if single and target.min_exponent == FORMATS["fp32"].min_exponent:
        return _round_bits(x, target, mode, generator)
    return _round_quanta(x, target, mode, generator)


def _round_bits(x: Tensor, target: Format, mode: Mode, generator: torch.Generator | None) -> Tensor:
    """float32 to a format with float32's exponents: add to the bits that go, then cut them off.

    Works on subnormals too, because the bit pattern of a magnitude is ordered and evenly spaced there.
    """
    cut = 23 - target.significand_bits
    bits = x.contiguous().view(torch.int32)
    half = 1 << (cut - 1)
    if mode == "nearest-even":
        bits = bits + (half - 1) + ((bits >> cut) & 1)
    elif mode == "nearest-away":
        bits = bits + half
    elif mode == "stochastic":
        dice = torch.randint(0, 1 << cut, x.shape, dtype=torch.int32, device=x.device, generator=generator)
        bits = bits + dice
    rounded = (bits & -(1 << cut)).view(torch.float32)
    # A NaN whose payload sits in the low bits would become an infinity, a carry could wrap its sign.
    return torch.where(torch.isnan(x), x, rounded)


def _round_quanta(x: Tensor, target: Format, mode: Mode, generator: torch.Generator | None) -> Tensor:
    """The general case: count quanta of the target's spacing at x, in float64 where that is exact."""
    wide = x.double()
    finite = torch.isfinite(wide)
    magnitude = torch.where(finite, wide, torch.zeros_like(wide)).abs()
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(target.min_exponent, target.max_exponent)
    # Two steps: 2^-(exponent - bits) alone may lie outside float64's own range.
    steps = -(exponent - target.significand_bits)
    quanta = torch.ldexp(torch.ldexp(magnitude, steps // 2), steps - steps // 2)
    if mode == "nearest-even":
        quanta = quanta.round()
    elif mode == "nearest-away":
        quanta = (quanta + 0.5).floor()
    elif mode == "toward-zero":
        quanta = quanta.floor()
    else:
        dice = torch.rand(x.shape, dtype=torch.float64, device=x.device, generator=generator)
        quanta = quanta.floor() + (dice < quanta - quanta.floor()).double()
    rounded = torch.ldexp(torch.ldexp(quanta, -(steps // 2)), -(steps - steps // 2))
    if mode == "toward-zero":
        rounded = rounded.clamp(max=target.largest)
    else:
        rounded = torch.where(rounded > target.largest, torch.full_like(rounded, torch.inf), rounded)
    return torch.where(finite, torch.copysign(rounded, wide), wide).to(x.dtype)
