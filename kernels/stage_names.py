"""Which stage a launched function belongs to, and what its grid counts, by the function's name.

The idea: a tool that looks at the GPU from outside (compute-sanitizer) knows functions and blocks; the reader
wants stages, chunks and heads. FLA's names are kept by the engines' copies, so one table serves them all.

Source: the launches in fla-core 0.4.0 and 0.6.0 (`ops/common`, `ops/utils`, `ops/gated_delta_rule`), vLLM
0.19.1 and 0.33.0, sglang 0.5.23. The state's kernel has one grid axis in fla-core 0.6.0 and two elsewhere, so
its blocks are not read.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

Axis = Literal["chunk", "head", "tile"]
CHUNK_HEAD: tuple[Axis, ...] = ("chunk", "head")
"""(NT, B * HV): the packed chunk, the value head (batch 1)."""


class LaunchedFunction(msgspec.Struct, frozen=True):
    """A kernel function that the table knows."""

    stage: str
    """As `gdncheck diff --stages` names it, or the operation beside the rule."""
    grid: tuple[Axis, ...] = ()
    """What blockIdx.x, y, z count; empty: not known."""


# The first pattern found in a function's name decides.
FUNCTIONS: tuple[tuple[str, LaunchedFunction], ...] = (
    (r"kkt_solve_kernel", LaunchedFunction("kkt+solve", CHUNK_HEAD)),
    (r"scaled_dot_kkt|_kkt_|^kkt", LaunchedFunction("kkt", CHUNK_HEAD)),
    (r"solve_tril|_inverse_kernel|^solve", LaunchedFunction("solve", CHUNK_HEAD)),
    (r"recompute_w_u|prepare_wy|^wu\b", LaunchedFunction("wu", CHUNK_HEAD)),
    (r"gate.*cumsum_scalar", LaunchedFunction("cumsum", CHUNK_HEAD)),
    (r"local_cumsum_scalar", LaunchedFunction("cumsum", CHUNK_HEAD)),
    (r"cumsum", LaunchedFunction("cumsum")),
    (r"fwd_kernel_h(_|$)|delta_rule_fwd_h", LaunchedFunction("state")),
    (r"chunk_fwd_kernel_o", LaunchedFunction("output", ("tile", "chunk", "head"))),
    (r"fused_recurrent|sigmoid_gating_delta_rule_update|packed_decode", LaunchedFunction("recurrent")),
    (r"l2norm", LaunchedFunction("l2norm")),
    (r"causal_conv1d", LaunchedFunction("conv")),
    (r"post_conv", LaunchedFunction("post-conv")),
    (r"gdn_gating|gdn_gate", LaunchedFunction("gate")),
    (r"layer_?norm|rms_?norm", LaunchedFunction("norm")),
)  # fmt: skip


def function_named(name: str) -> LaunchedFunction | None:
    """What a function is; None for one of torch's, of a library's or of somebody's own."""
    for pattern, known in FUNCTIONS:
        if re.search(pattern, name):
            return known
    return None
