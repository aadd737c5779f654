"""Precision: at which points a kernel rounds, to which format, and how its dot products are done.

The idea: two sound kernels of one algorithm differ only in such a table. So a kernel's rounding is
data, a `Precision`, that the emulation executes, a contract quotes and a sweep changes point by point.
The tables below were read in the packages' sources; `source` says where.

What each point means is listed in `CAST_POINTS`; the algorithm itself is in `emulation` and
`emulation_recurrent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

import torch

from .rounding import FORMATS, MODES, Mode, format_of

Solve = Literal["substitution", "blocked", "merged", "doubling", "direct"]

CAST_POINTS: dict[str, str] = {
    "handover": "the initial state as the call takes it in (state between splits)",
    "l2norm": "q and k after an l2norm inside the kernel",
    "beta": "beta as the kernel reads it",
    "cumsum": "G, the cumulative log decay inside a chunk",
    "kkt": "A = strict_lower(beta_i k_i.k_j exp(G_i - G_j))",
    "solve_step": "products inside a doubling or a merged inverse; each row of a substitution",
    "solve": "T = (I + A)^-1",
    "solve_beta": "T beta, of a kernel that applies T to the error",
    "sk": "exp(G) k S, of a kernel that applies T to the error",
    "error": "v - exp(G) k S, likewise",
    "v_beta": "v * beta, operand of u",
    "k_beta": "k * beta before the decay is multiplied in",
    "k_beta_decay": "k * beta * exp(G), operand of w",
    "k_decay": "k * exp(G), k * exp(-G) and q * exp(G) of a kernel that factors the decay",
    "w": "w as stored",
    "u": "u as stored (recurrent kernel: beta * (v - S^T k))",
    "h": "the state at a chunk's start as stored for the output",
    "h_dot": "the state as operand of w S (or k S)",
    "v_new": "v_new = u - w S (or T beta error) as stored for the output",
    "v_decay": "v_new * exp(G_last - G), operand of the state update",
    "k_left": "k * exp(G_last - G), operand of the state update of a kernel that decays k there",
    "q_scale": "q * scale, of a kernel that scales q before everything else",
    "q_decay": "q * exp(G), operand of q S of a kernel that decays q before the product",
    "state": "the running state after each chunk (recurrent kernel: after each token)",
    "qk_decay": "lower(q k^T exp(G_i - G_j)), operand of the output",
    "output": "o",
    "final_state": "the final state as returned",
}
DOTS: dict[str, str] = {
    "kkt": "k k^T",
    "solve": "products that merge blocks of the inverse, or double it",
    "u": "T (v beta), or (T beta) error",
    "w": "T (k beta exp(G))",
    "h": "w S, or k S",
    "state": "k^T v_new",
    "qh": "q S",
    "qk": "q k^T",
    "av": "lower(q k^T) v_new",
}
FOLLOWS_INPUT = ("native", "promoted")
"""`native`: the dtype of q, k and v; `promoted`: the wider of that and beta's dtype."""


@dataclass(frozen=True)
class Precision:
    """The rounding of one kernel. Points that `casts` leaves out keep the arithmetic's float32."""

    name: str
    casts: Mapping[str, str] = field(default_factory=dict)
    """Cast point -> format of `rounding.FORMATS`, or `native` or `promoted`."""
    dots: Mapping[str, str] = field(default_factory=dict)
    """Dot product -> `ieee` or `tf32`: the format of float32 operands. Accumulation is `accumulate`."""
    solve: Solve = "blocked"
    """How T comes about: row by row; 16-blocks row by row, then merged; 8-blocks row by row, then merged two
    by two; by doubling; or not at all (`direct`: u and w by triangular solves)."""
    mode: Mode = "nearest-even"
    """How cast points round."""
    tf32_mode: Mode = "toward-zero"
    """How a float32 operand becomes tf32: the tensor core ignores the low 13 bits unless told to round."""
    accumulate: str | None = None
    """Format of a dot's partial sums where it is narrower than the arithmetic's: rounded after every 16
    products. None: the arithmetic's own."""
    arithmetic: Literal["fp32", "fp64"] = "fp32"
    """What everything between the casts is computed in."""
    factored_exp: bool = False
    """Decay as exp(G_i) * exp(-G_j) on the operands: overflows once -G passes 88.7 inside a chunk."""
    kkt_from: Literal["k", "k_beta"] = "k"
    """Operand of k k^T: k, with beta multiplied into the product, or the k_beta of the cast point."""
    v_new_from: Literal["wu", "error"] = "wu"
    """v_new = u - w S with u = T v beta and w = T k beta exp(G), or (T beta) (v - exp(G) k S)."""
    update_from: Literal["registers", "stored"] = "registers"
    """v_new in the state update: before the cast point `v_new`, or after it."""
    update_decay: Literal["v_new", "k"] = "v_new"
    """What exp(G_last - G) is multiplied into for the state update: cast point `v_decay` or `k_left`."""
    read_decay: Literal["product", "q"] = "product"
    """What exp(G) is multiplied into for the output: the product q S, or q before it (`q_decay`)."""
    scaled: Literal["output", "q"] = "output"
    """What the scale is multiplied into: the products of the output, or q before them (`q_scale`)."""
    source: str = ""

    def __post_init__(self) -> None:
        for point, fmt in self.casts.items():
            _check(point, CAST_POINTS, "cast point")
            _check(fmt, (*FOLLOWS_INPUT, *FORMATS), f"format of {point}")
        for dot, fmt in self.dots.items():
            _check(dot, DOTS, "dot")
            _check(fmt, ("ieee", "tf32"), f"operand format of dot {dot}")
        _check(self.solve, ("substitution", "blocked", "merged", "doubling", "direct"), "solve")
        _check(self.v_new_from, ("wu", "error"), "way to v_new")
        _check(self.update_from, ("registers", "stored"), "v_new of the state update")
        _check(self.update_decay, ("v_new", "k"), "decay of the state update")
        _check(self.read_decay, ("product", "q"), "decay of the output")
        _check(self.scaled, ("output", "q"), "place of the scale")
        _check(self.mode, MODES, "rounding mode")
        _check(self.tf32_mode, MODES, "tf32 rounding mode")
        if self.accumulate is not None:
            _check(self.accumulate, FORMATS, "accumulation format")
        _check(self.arithmetic, ("fp32", "fp64"), "arithmetic")
        _check(self.kkt_from, ("k", "k_beta"), "operand of k k^T")
        object.__setattr__(self, "casts", MappingProxyType(dict(self.casts)))
        object.__setattr__(self, "dots", MappingProxyType(dict(self.dots)))

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from plain dicts: the read-only views do not copy."""
        plain = {**self.__dict__, "casts": dict(self.casts), "dots": dict(self.dots)}
        return (_rebuild, (plain,))

    def at(self, point: str, native: torch.dtype, beta: torch.dtype | None = None) -> str:
        """Format of a cast point for inputs of dtype `native` (and beta of its own dtype)."""
        fmt = self.casts.get(point, self.arithmetic)
        if fmt == "native":
            return format_of(native)
        if fmt == "promoted":
            return format_of(torch.promote_types(native, native if beta is None else beta))
        return fmt

    def dot(self, name: str) -> str:
        return self.dots.get(name, "ieee")

    def with_casts(self, **casts: str) -> Precision:
        """The same table with some points changed."""
        return replace(self, casts={**self.casts, **casts})

    def with_mode(self, mode: Mode) -> Precision:
        return replace(self, mode=mode)

    def on(self, device: str) -> Precision:
        """The table as it holds on a device: tf32 exists on `cuda` only (Triton's interpreter has none)."""
        if torch.device(device).type == "cuda" or not any(v == "tf32" for v in self.dots.values()):
            return self
        return replace(self, dots={})


def _rebuild(fields: dict[str, object]) -> Precision:
    return Precision(**fields)  # type: ignore[arg-type]


def _check(value: str, known: object, what: str) -> None:
    if value not in known:  # type: ignore[operator]
        raise ValueError(f"unknown {what} {value!r}; known: {', '.join(known)}")  # type: ignore[arg-type]


# flash-linear-attention 0.4.0, fla/ops: every stage's store goes to the input dtype except the cumsum,
# A (float32 on purpose) and the final state; the state update takes the unrounded v_new from registers.
_FLA_CASTS = {
    "l2norm": "native",
    "solve": "native",
    "v_beta": "native",
    "k_beta": "promoted",
    "k_beta_decay": "native",
    "w": "native",
    "u": "native",
    "h": "native",
    "h_dot": "native",
    "v_new": "native",
    "v_decay": "native",
    "qk_decay": "native",
    "output": "native",
}
# tl.dot's default on float32 operands is tf32; u is called with allow_tf32=False, the solve with 'ieee'.
_FLA_DOTS = {name: "tf32" for name in DOTS if name not in ("u", "solve")}
_ALL_TF32 = dict.fromkeys(DOTS, "tf32")

PROFILES: dict[str, Precision] = {
    p.name: p
    for p in (
        Precision(
            "fla-0.4",
            casts=_FLA_CASTS,
            dots=_FLA_DOTS,
            source="fla-core 0.4.0: gated_delta_rule/{chunk,wy_fast}.py, common/{chunk_delta_h,chunk_o,"
            "chunk_scaled_dot_kkt}.py, utils/{cumsum,solve_tril}.py",
        ),
        Precision(
            "fla-0.6",
            casts=_FLA_CASTS,
            dots={**_FLA_DOTS, "solve": "tf32"},
            source="fla-core 0.6.0: gated_delta_rule/chunk_fwd.py (fused kkt and solve at chunk size 64, "
            "merges in SOLVE_TRIL_DOT_PRECISION: tf32 on SM80 and later), wy_fast.py, common/*.py",
        ),
        Precision(
            "fla-0.6-small",
            casts=_FLA_CASTS,
            dots=_FLA_DOTS,
            source="fla-core 0.6.0: gated_delta_rule/chunk_fwd.py (chunk sizes 16 and 32 take "
            "common/chunk_scaled_dot_kkt.py and utils/solve_tril.py, FLA_TRIL_PRECISION 'ieee')",
        ),
        Precision(
            "fla-recurrent",
            casts={"output": "native"},
            solve="direct",
            source="fla-core 0.4.0 and 0.6.0: gated_delta_rule/fused_recurrent.py (float32 registers)",
        ),
        Precision(
            "hf-torch",
            casts={"output": "native"},
            solve="direct",
            kkt_from="k_beta",
            source="transformers 5.24.0: models/qwen3_5/modeling_qwen3_5.py, torch_chunk_gated_delta_rule",
        ),
        Precision(
            "generic",
            casts={**_FLA_CASTS, "beta": "native", "k_beta": "native"},
            dots=_ALL_TF32,
            source="the coarsest rounding that a sound chunk kernel has in a dtype: every operand and stored "
            "intermediate in it, float32 accumulation, state and cumsum; float32 inputs on a GPU in tf32",
        ),
        Precision(
            "generic-doubling",
            casts={**_FLA_CASTS, "beta": "native", "k_beta": "native"},
            dots=_ALL_TF32,
            solve="doubling",
            source="generic, for a kernel that inverts by doubling: its powers of A cost digits that other "
            "ways keep, so it is a profile of its own and must be declared",
        ),
        Precision(
            "vllm-0.19",
            casts={**_FLA_CASTS, "k_beta": "native"},
            dots=_FLA_DOTS,
            kkt_from="k_beta",
            source="vllm 0.19.1: model_executor/layers/fla/ops/*.py; as fla-core 0.4.0, but k * beta is "
            "cast to the dtype of k before kkt (from 0.21.0 it is not: profile fla-0.4)",
        ),
        Precision(
            "sglang-0.5",
            casts={**_FLA_CASTS, "k_beta": "fp32"},
            dots={**_FLA_DOTS, "kkt": "ieee", "solve": "tf32"},
            source="sglang 0.5.23: kernels/ops/attention/fla/*.py; k k^T in the dtype of k, beta "
            "multiplied in afterwards in float32, merges of the fused kkt and solve in tf32 from SM80 on",
        ),
        Precision(
            "flashinfer-0.6",
            casts={
                "l2norm": "native",
                "kkt": "fp16",
                "solve_step": "fp16",
                "solve": "fp16",
                "solve_beta": "native",
                "sk": "native",
                "error": "native",
                "h": "native",
                "h_dot": "native",
                "v_new": "native",
                "v_decay": "native",
                "qk_decay": "native",
                "output": "native",
            },
            solve="merged",
            v_new_from="error",
            update_from="stored",
            source="flashinfer 0.6.6: include/flashinfer/flat/hopper/collective/"
            "flat_collective_tma_warpspecialized_delta_rule.hpp (InverseType half, T beta in the dtype, "
            "v - Element(S k alpha), the stored v_new decayed for the float32 state), "
            "flat/ampere/collective/flat_collective_inverse.hpp (8x8 blocks row by row, merged in half)",
        ),
        Precision(
            "vllm-cpu",
            # A is solved in place, row by row in bf16; q is rounded with its scale, q and k with their decay.
            casts={
                **_FLA_CASTS,
                "beta": "native",
                "k_beta": "fp32",
                "kkt": "native",
                "solve_step": "native",
                "k_left": "native",
                "q_scale": "native",
                "q_decay": "native",
            },
            solve="substitution",
            scaled="q",
            update_from="stored",
            update_decay="k",
            read_decay="q",
            source="vllm 0.32.0: csrc/cpu/sgl-kernels/fla.cpp, l2norm_kernel and query.mul(scale), "
            "solve_tril_kernel, apply_beta_kernel, update_value_kernel, update_key_kernel, "
            "chunk_gated_delta_rule_fwd_intra and _inter (bf16 operands, float32 sums, exp to 20 ulp)",
        ),
        Precision("exact", arithmetic="fp64", source="no rounding: the algorithm itself, in float64"),
    )
}


def precision_for(profile: str, *, device: str = "cpu", chunk_size: int | None = None) -> Precision:
    """The table of a profile by name, as it holds on a device.

    `fla-0.6` at a chunk size below 64 is `fla-0.6-small`: another path of the same package.
    Raises ValueError for an unknown profile.
    """
    _check(profile, PROFILES, "precision profile")
    if profile == "fla-0.6" and chunk_size is not None and chunk_size < 64:
        profile = "fla-0.6-small"
    return PROFILES[profile].on(device)
