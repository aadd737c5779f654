"""Synthetic cases of the whole core: what the layer's projections would hand over, and what follows from it.

The idea: the core's inputs are drawn like a family's (`portable.Draw`), and the tensors that the core
computes itself (q, k, v, g, beta) are the float64 truth's, rounded as a layer stores them; so one case serves
every operation and the chain. `core-exact` is made so that nothing needs rounding from the convolution to the
norm: its units are large enough for every eps to vanish and for SiLU and softplus to be at their ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...reference.conv import causal_conv
from ...reference.gate import gate
from ..case import CallOptions, Case, Origin
from ..errors import BadInput
from .portable import Draw, log

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# 2^20 squared leaves nothing of eps in float32, and SiLU and sums keep it; fp16 holds 2^14, and products with
# values of 2^8, whose norm still absorbs eps.
KEY_UNIT = {"bf16": 2.0**20, "fp16": 2.0**14, "fp32": 2.0**20}
VALUE_UNIT = {"bf16": 2.0**20, "fp16": 2.0**8, "fp32": 2.0**20}
CLOSED, OPEN, RESET = -9984.0, 9984.0, 1024.0
"""Arguments, exact in every dtype, at which sigmoid is 0 and 1, and softplus 0 and its argument."""

QUIET_STRETCH = 8  # tokens


class CoreShape:
    """Sizes of a core."""

    def __init__(
        self, lengths: Sequence[int], k_heads: int, v_heads: int, dims: tuple[int, int], width: int
    ) -> None:
        self.lengths, self.HK, self.HV, (self.K, self.V) = tuple(lengths), k_heads, v_heads, dims
        self.W, self.N, self.T = width, len(lengths), sum(lengths)
        self.D = 2 * self.HK * self.K + self.HV * self.V

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0)


Drawn = dict[str, Tensor]


def _qwen(shape: CoreShape, draw: Draw, dtype: str) -> Drawn:
    """Projections of unit size, decays and taps as in a fresh Qwen3.5 layer."""
    s = shape
    rate = draw.uniform("A_log", s.HV, low=0.01, high=16.0)
    return {
        "conv_input": draw.normal("conv_input", s.T, s.D),
        "conv_weight": draw.normal("conv_weight", s.D, s.W) * s.W**-0.5,
        "conv_state": draw.normal("conv_state", s.N, s.D, s.W - 1),
        "a": draw.normal("a", s.T, s.HV),
        "b": draw.normal("b", s.T, s.HV) * 1.5,
        "A_log": log(rate),
        "dt_bias": draw.normal("dt_bias", s.HV) - 2.0,
        "z": draw.normal("z", s.T, s.HV, s.V),
        "norm_weight": 1.0 + 0.25 * draw.normal("norm_weight", s.V),
        "initial_state": 0.25 * draw.normal("initial_state", s.N, s.HV, s.K, s.V),
    }


def _wide_gate(shape: CoreShape, draw: Draw, dtype: str) -> Drawn:
    """a and b from 1e-3 to 1e3 of either sign: both ends of softplus and sigmoid, and the thresholds.

    Rates are small, so that a chunk's decays stay apart in float32 (a sum of 1e5 does not hold 1e-3).
    """
    drawn = _qwen(shape, draw, dtype)
    drawn["A_log"] = log(draw.uniform("A_log", shape.HV, low=1e-3, high=1e-2))
    for name in ("a", "b"):
        size = draw.uniform(f"{name} size", shape.T, shape.HV, low=-3.0, high=3.0)
        # 10^x by repeated roots is not portable; 2^x from integers and one multiplication is.
        whole = torch.floor(size * 3.25)
        drawn[name] = draw.signs(f"{name} sign", shape.T, shape.HV) * torch.ldexp(
            1.0 + draw.uniform(f"{name} part", shape.T, shape.HV), whole.int()
        )
    return drawn


def _quiet(shape: CoreShape, draw: Draw, dtype: str) -> Drawn:
    """Rows near and below sqrt(eps), and rows of zeros, in stretches longer than a window: eps counts."""
    drawn = _qwen(shape, draw, dtype)
    blocks = -(-shape.T // QUIET_STRETCH)
    steps = draw.integers("loud", blocks, low=0, high=14)
    silent = (draw.uniform("silent", blocks) < 0.1).double()
    factor = torch.ldexp(1 - silent, -steps.int()).repeat_interleave(QUIET_STRETCH)[: shape.T]
    drawn["conv_input"] = drawn["conv_input"] * factor[:, None]
    drawn["conv_state"] = drawn["conv_state"] * 2.0**-12
    return drawn


def _large_values(shape: CoreShape, draw: Draw, dtype: str) -> Drawn:
    """Values whose squares leave fp16 (norms above 256), in the rows of the convolution and of z."""
    drawn = _qwen(shape, draw, dtype)
    drawn["conv_input"] = drawn["conv_input"] * 200.0
    drawn["z"] = drawn["z"] * 4.0
    return drawn


def _exact(shape: CoreShape, draw: Draw, dtype: str) -> Drawn:
    """One-hot q and k, a quarter of v, powers of two; gates at their ends; z and weights integers."""
    s, unit = shape, VALUE_UNIT[dtype]
    if s.V % 4 or 4 ** (s.K.bit_length() // 2) != s.K:
        raise BadInput(f"core-exact needs K a power of 4 and V a multiple of 4, not {s.K} and {s.V}")
    past = s.W - 1
    blocks, states = [], []
    for name, heads, dim in (("q", s.HK, s.K), ("k", s.HK, s.K), ("v", s.HV, s.V)):
        rows = _exact_rows(name, s, heads, dim, draw) * (unit if name == "v" else KEY_UNIT[dtype])
        per_sequence = torch.split(rows, [past + n for n in s.lengths])
        states.append(torch.stack([part[:past] for part in per_sequence]).flatten(2).mT)
        blocks.append(torch.cat([part[past:] for part in per_sequence]).flatten(1))
    taps = draw.integers("taps", 2 * s.HK + s.HV, low=0, high=past)
    head_of = [h for h, dim in enumerate([s.K] * 2 * s.HK + [s.V] * s.HV) for _ in range(dim)]
    weight = torch.nn.functional.one_hot(taps[torch.tensor(head_of)], s.W).double()
    reset = draw.uniform("reset", s.T, s.HV) < 0.02
    state = _quarter(draw, "initial_state", s.N * s.HV * s.K, s.V).reshape(s.N, s.HV, s.K, s.V)
    return {
        "conv_input": torch.cat(blocks, 1),
        "conv_weight": weight,
        "conv_state": torch.cat(states, 1),
        "a": torch.where(reset, RESET, CLOSED).double(),
        "b": torch.where(draw.uniform("write", s.T, s.HV) < 0.8, OPEN, CLOSED).double(),
        "A_log": torch.zeros(s.HV, dtype=torch.float64),
        "dt_bias": 16.0 * draw.integers("dt_bias", s.HV, low=0, high=3).double(),
        "z": 32.0 * draw.integers("z", s.T, s.HV, s.V, low=0, high=3).double(),
        "norm_weight": draw.integers("norm_weight", s.V, low=1, high=3).double(),
        "initial_state": state * unit,
    }


def _exact_rows(name: str, s: CoreShape, heads: int, dim: int, draw: Draw) -> Tensor:
    """[T + N (W-1), heads, dim] of zeros and ones: q, k one-hot (k in turn, none too often), v a quarter."""
    count = s.T + s.N * (s.W - 1)
    if name == "v":
        return _quarter(draw, "v", count * heads, dim).reshape(count, heads, dim)
    if name == "q":
        index = draw.integers("q", count, heads, low=0, high=dim - 1)
    else:
        start = draw.integers("k", heads, low=0, high=dim - 1)
        index = (torch.arange(count)[:, None] * 5 + start) % dim
    return torch.nn.functional.one_hot(index, dim).double()


def _quarter(draw: Draw, name: str, rows: int, dim: int) -> Tensor:
    """[rows, dim]: a quarter of each row is 1, which quarter tells rows apart."""
    order = draw.uniform(name, rows, dim).argsort(-1)
    return (order < dim // 4).double()


FAMILIES: dict[str, Callable[[CoreShape, Draw, str], Drawn]] = {
    "core-qwen": _qwen,
    "core-wide-gate": _wide_gate,
    "core-quiet": _quiet,
    "core-large": _large_values,
    "core-exact": _exact,
}


def make_core(
    family: str,
    *,
    lengths: Sequence[int],
    k_heads: int = 2,
    v_heads: int = 4,
    dims: tuple[int, int] = (16, 16),
    width: int = 4,
    dtype: str = "bf16",
    state: bool = True,
    seed: int = 0,
) -> Case:
    """A synthetic case of the whole core.

    lengths: tokens per sequence. dtype: of the projections, q, k, v and beta; states of the rule, A_log,
    dt_bias and norm_weight are float32. state: whether sequences have a past (of conv and rule).
    Raises BadInput for an unknown family or dtype, or sizes that the family cannot take.
    """
    if family not in FAMILIES:
        raise BadInput(f"family {family!r} is unknown; families of the core: {', '.join(FAMILIES)}")
    if dtype not in DTYPES:
        raise BadInput(f"dtype {dtype!r} is unknown; use {', '.join(DTYPES)}")
    if not lengths or v_heads % k_heads:
        raise BadInput(f"lengths {list(lengths)} and heads {k_heads}, {v_heads} make no case")
    shape = CoreShape(lengths, k_heads, v_heads, dims, width)
    drawn = FAMILIES[family](shape, Draw(family, seed), dtype)
    if not state:
        drawn = {name: x for name, x in drawn.items() if name not in ("conv_state", "initial_state")}
    kept = ("A_log", "dt_bias", "norm_weight", "initial_state")
    tensors = {n: x.float() if n in kept else x.to(DTYPES[dtype]) for n, x in drawn.items()}
    tensors["cu_seqlens"] = shape.cu_seqlens
    tensors |= computed(tensors, shape)
    return Case(
        op="core",
        tensors=tensors,
        options=CallOptions(qk="raw"),
        origin=Origin(kind="synthetic", family=family, seed=seed),
        finite=all(bool(torch.isfinite(t).all()) for t in tensors.values()),
    )


def computed(tensors: Drawn, shape: CoreShape) -> Drawn:
    """q, k (raw), v, g, beta as the truth has them, rounded as a layer stores them."""
    native = tensors["conv_input"].dtype
    x, _ = causal_conv(
        tensors["conv_input"], tensors["conv_weight"], None, tensors.get("conv_state"), tensors["cu_seqlens"]
    )
    keys = shape.HK * shape.K
    q, k, v = torch.split(x.to(native), [keys, keys, shape.HV * shape.V], dim=1)
    g, beta = gate(tensors["a"], tensors["b"], tensors["A_log"], tensors["dt_bias"])
    return {
        "q": q.reshape(-1, shape.HK, shape.K).contiguous(),
        "k": k.reshape(-1, shape.HK, shape.K).contiguous(),
        "v": v.reshape(-1, shape.HV, shape.V).contiguous(),
        "g": g.float(),
        "beta": beta.to(native),
    }
