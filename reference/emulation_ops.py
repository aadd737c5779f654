"""The operations around the rule as kernels compute them: float32 arithmetic, rounding at named cast points.

The idea: as in `emulation`, two sound kernels of one operation differ only in where they round and by how
little their exp or rsqrt is off; the first is a table (cast point -> format), the second a seeded jitter of
half a unit or one of float32 at the same points. CAST_POINTS says what each point is. What is computed
(eps, threshold, order) is `op_functions`' subject; what the result is judged by is compare's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from .op_functions import Conv, Gate, L2Norm, Norm
from .packing import sequence_bounds
from .rounding import format_of, round_to

CAST_POINTS: dict[str, str] = {
    "conv.product": "input times tap",
    "conv.sum": "the running sum of the taps, bias included",
    "conv.pre": "the sum before SiLU",
    "conv.out": "conv_output as stored",
    "l2norm.square": "x * x",
    "l2norm.sum": "sum of squares",
    "l2norm.root": "1 / sqrt(sum + eps)",
    "l2norm.out": "q and k as stored",
    "gate.argument": "a + dt_bias",
    "gate.softplus": "softplus(a + dt_bias)",
    "gate.rate": "exp(A_log)",
    "gate.g": "g as stored",
    "gate.sigmoid": "the steps of sigmoid(b)",
    "gate.beta": "beta as stored",
    "norm.square": "x * x (x times SiLU of z where the gate comes first)",
    "norm.root": "1 / sqrt(mean + eps)",
    "norm.normed": "x / sqrt(mean + eps) before the weight",
    "norm.weighted": "times the weight",
    "norm.silu": "SiLU of z",
    "norm.out": "normed as stored",
}
U32 = 2.0**-24
# Half-ulps of float32 by which a sound kernel may be off at a point: ex2.approx and rsqrt.approx 2 ulp at
# most (PTX ISA), sums in another order less. Points that are left out round as they say and no more.
JITTER: dict[str, int] = {
    "conv.product": 1,
    "conv.out": 4,
    "l2norm.sum": 2,
    "l2norm.root": 4,
    "gate.softplus": 4,
    "gate.rate": 4,
    "gate.beta": 4,
    "norm.square": 2,
    "norm.root": 4,
    "norm.silu": 4,
}
# lg2.approx is off by 2^-22 absolutely near 1 (PTX ISA), which log(1 + exp(x)) meets for small exp(x).
LOG_ERROR = 2.0**-22


@dataclass(frozen=True)
class OpRounding:
    """Where one run of an operation rounds."""

    casts: Mapping[str, str] = field(default_factory=dict)
    """Cast point -> format, or `native` (the dtype of the operation's main input), or `promoted` (the wider
    of that and its weight's); others stay float32."""
    native: torch.dtype = torch.float32
    weight: torch.dtype | None = None
    """Dtype of the operation's weight, for `promoted`."""
    seed: int | None = None
    """Of the jitter; None: none."""

    def __call__(self, point: str, x: Tensor) -> Tensor:
        """x after the point's rounding."""
        most = JITTER.get(point, 0)
        if self.seed is not None and most:
            step = self.dice(point, x) * (most * U32)
            # An exact 0, 1 or power of two stays: approximations return those exactly.
            exact = torch.frexp(x)[0].abs() == 0.5
            x = torch.where(exact | (x == 0), x, x + x * step)
        fmt = self.casts.get(point)
        if fmt is None:
            return x
        if fmt == "promoted" and self.weight is not None:
            fmt = format_of(torch.promote_types(self.native, self.weight))
        return round_to(x, format_of(self.native) if fmt in ("native", "promoted") else fmt)

    def dice(self, point: str, x: Tensor) -> Tensor:
        """Numbers of [-1, 1] in the shape of x; zeros without a seed."""
        if self.seed is None:
            return torch.zeros_like(x)
        dice = torch.Generator(device="cpu").manual_seed(self.seed * 65_537 + _number(point))
        return (torch.rand(x.shape, generator=dice) * 2 - 1).to(x)


def _number(point: str) -> int:
    return list(CAST_POINTS).index(point)


def emulate_gate(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, at: OpRounding, function: Gate | None = None
) -> tuple[Tensor, Tensor]:
    """g and beta [T, HV] in float32 holding what the casts leave. Arguments as `gate.gate`."""
    function = function or Gate()
    x = at("gate.argument", a.float() + dt_bias.float())
    small = torch.exp(torch.where(x > 80, torch.zeros_like(x), x))
    if function.log1p:
        soft = torch.log1p(small)
    else:
        lost = at.dice("gate.softplus", x) * torch.where((small > 0) & (small < 1), LOG_ERROR, 0.0)
        soft = torch.log(1 + small) + lost
    if function.threshold is not None:
        soft = torch.where(x > function.threshold, x, soft)
    else:
        soft = torch.where(x > 80, x, soft)
    g = at("gate.g", -at("gate.rate", A_log.float().exp()) * at("gate.softplus", soft))
    e = at("gate.sigmoid", torch.exp(-b.float()))
    beta = 1.0 / at("gate.sigmoid", 1.0 + e) if "gate.sigmoid" in at.casts else torch.sigmoid(b.float())
    return g, at("gate.beta", at("gate.sigmoid", beta))


def emulate_l2norm(x: Tensor, at: OpRounding, function: L2Norm | None = None) -> Tensor:
    """[..., D] in float32. The sum of squares overflows where its format does, as a kernel's would."""
    function = function or L2Norm()
    wide = x.float()
    total = at("l2norm.sum", at("l2norm.square", wide * wide).sum(-1, keepdim=True))
    if function.place == "inside":
        root = (total + function.eps).rsqrt()
    elif function.place == "outside":
        root = 1.0 / (total.sqrt() + function.eps)
    else:
        root = 1.0 / total.sqrt().clamp_min(function.eps)
    return at("l2norm.out", wide * at("l2norm.root", root))


def emulate_norm(
    x: Tensor, z: Tensor, weight: Tensor, at: OpRounding, function: Norm | None = None
) -> Tensor:
    """[..., V] in float32. Arguments as `norm.gated_rms_norm`."""
    function = function or Norm()
    gate = z.float()
    gate = torch.ones_like(gate) if function.gate == "none" else at("norm.silu", gate * torch.sigmoid(gate))
    wide = x.float()
    if function.gate == "before":
        wide = wide * gate
    mean = at("norm.square", wide * wide).mean(-1, keepdim=True)
    normed = at("norm.normed", wide * at("norm.root", (mean + function.eps).rsqrt()))
    weighted = at("norm.weighted", normed * (weight.float() + function.weight_offset))
    return at("norm.out", weighted if function.gate == "before" else weighted * gate)


def emulate_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor | None,
    cu_seqlens: Tensor | None,
    at: OpRounding,
    function: Conv | None = None,
) -> Tensor:
    """conv_output [T, D] in float32. Arguments as `conv.causal_conv`; the state left behind is a copy."""
    function = function or Conv()
    bounds = sequence_bounds(cu_seqlens, x.shape[0]).tolist()
    history, taps = weight.shape[1] - 1, weight.float()
    parts = [x.new_zeros((0, x.shape[1]), dtype=torch.float32)]
    for n, (start, stop) in enumerate(pairwise(bounds)):
        past = (
            x.new_zeros((history, x.shape[1]), dtype=torch.float32)
            if conv_state is None
            else conv_state[n].float().T
        )
        row = torch.cat([past, x[start:stop].float()])
        total = torch.zeros_like(row[history:])
        if bias is not None:
            total = total + bias.float()
        for tap in range(history + 1):
            product = at("conv.product", row[tap : tap + stop - start] * taps[:, tap])
            total = at("conv.sum", total + product)
        parts.append(total)
    total = at("conv.pre", torch.cat(parts))
    if function.activation is not None:
        total = total * torch.sigmoid(total)
    return at("conv.out", total)
