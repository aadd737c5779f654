"""Bound per entry: no output of a convolution is further from the truth than its own rounding can take it.

Statement. With P = sum |w x|, A = P + |b| and the exact sum s: products rounded with unit u_p, W + 1 sums
with u_s, the stored sum with u_r err by E <= u_p P + (W + 1) u_s A, E' <= E + u_r (|s| + E); SiLU has a
slope of 1.1 at most and is itself good to (8 + 4 |s|) 2^-24 (CUDA's __expf is good to 2 + 1.2 |s| ulp); the
result is rounded once more. Each term has the format's smallest step besides. Below s = -86 a fast division
by 1 + exp(-s) may give 0 (CUDA: __fdividef beyond 2^126). Standard analysis (Higham, Accuracy and Stability,
3.1), first order with a twentieth to spare.
Fires on: the first entry beyond it, also in a channel that is small beside the others of its tile.
Silent on: what the declared casts explain; a kernel that declares none may round at every one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.ops.conv_state import starting_conv_state
from ...reference.bounds import smallest_error
from ...reference.conv import causal_conv
from ...reference.rounding import FORMATS, format_of
from ..nonfinite import place_of_row
from ..report_words import number, where
from ..tiles import unit_roundoff
from ..verdict import Outcome
from .layout import as_rows
from .trial import OpTrial

NAME, TIER = "running-bound", 2
SLOPE = 1.1  # of SiLU: its largest derivative is 1.0998
MINIMUM = -2.4  # where that slope is steepest downwards; further down it only flattens
SPARE = 1.05
DIVISION_GIVES_ZERO = -86.0
FAST_EXP = 2.0**-20  # of exp_u20 and of expf under --use_fast_math, relative
ANY_CASTS = {"conv.product": "native", "conv.pre": "native"}


def check_bound(trial: OpTrial) -> Outcome:
    """Compare every entry of conv_output with its bound."""
    measured = trial.measured["conv_output"]
    error = (trial.outputs["conv_output"].double() - trial.truth["conv_output"]).abs()
    bound = entry_bounds(trial)
    over = torch.isfinite(bound) & torch.isfinite(error) & (error > SPARE * bound)
    largest = float((error / bound.clamp_min(torch.finfo(torch.float64).tiny))[torch.isfinite(error)].max())
    if not bool(over.any()):
        return Outcome(check=NAME, tier=TIER, status="ok", numbers={"largest_share": largest})
    token, channel = over.nonzero()[0].tolist()
    n_heads = as_rows("conv_output", bound, trial.inputs.heads).shape[1]
    head = channel // (bound.shape[1] // n_heads)
    place = place_of_row(measured.tiles, token, head, "wrong")
    pair = (trial.outputs["conv_output"], trial.truth["conv_output"], bound)
    got, want, limit = (float(x[token, channel]) for x in pair)
    reason = (
        f"conv_output is wrong at {where(place)}, channel {channel}: it is {got:g} and must be {want:g} "
        f"within {number(limit)} ({int(over.sum())} of {over.numel()} entries are beyond their rounding)"
    )
    atol = float(error[torch.isfinite(error)].max())
    numbers = {"entries": int(over.sum()), "largest_share": largest, "would_pass": {"atol": atol}}
    return Outcome(check=NAME, tier=TIER, status="fires", reason=reason, place=place, numbers=numbers)


def entry_bounds(trial: OpTrial) -> Tensor:
    """[T, D] float64: how far each output may be from the truth."""
    t = trial.under_clauses.tensors
    x, weight, bias, state = t["conv_input"], t["conv_weight"], t.get("conv_bias"), starting_conv_state(t)
    casts = trial.casts if trial.declared else ANY_CASTS
    native = torch.promote_types(x.dtype, weight.dtype)
    state_abs = None if state is None else state.double().abs()
    wide = (x.double().abs(), weight.double().abs())
    products, _ = causal_conv(*wide, None, state_abs, t["cu_seqlens"], None)
    total, _ = causal_conv(x.double(), weight.double(), bias, state, t["cu_seqlens"], None)
    everything = products if bias is None else products + bias.double().abs()
    width = weight.shape[1]
    u_product, step = _unit(casts, "conv.product", native)
    u_sum, sum_step = _unit(casts, "conv.sum", native)
    error = u_product * products + width * step + (width + 1) * (u_sum * everything + sum_step)
    u_pre, pre_step = _unit(casts, "conv.pre", x.dtype)
    error = error + u_pre * (total.abs() + error) + pre_step
    output = trial.truth["conv_output"].abs()
    if trial.under_clauses.function.activation is not None:
        exp = FAST_EXP if not trial.declared or trial.info.contract.find("conv.exp") else 0.0
        error = _slope(total + error) * error + (exp + (8 + 4 * total.abs()) * 2.0**-24) * output
        error = error + torch.where(total < DIVISION_GIVES_ZERO, output, 0.0)
    stored = trial.outputs["conv_output"].dtype
    return error + unit_roundoff(stored) * (output + error) + smallest_error(stored)


def _slope(edge: Tensor) -> Tensor:
    """Largest slope of SiLU up to the upper edge of what the sum can be: it falls off below the minimum."""
    sigmoid = torch.sigmoid(edge)
    there = (sigmoid * (1 + edge * (1 - sigmoid))).abs()
    return torch.where(edge < MINIMUM, there, SLOPE)


def _unit(casts: dict[str, str], point: str, native: torch.dtype) -> tuple[float, float]:
    """(unit round-off, smallest step) of a cast point; float32's where there is none."""
    fmt = FORMATS[format_of(native) if casts.get(point) == "native" else casts.get(point, "fp32")]
    dtype = fmt.dtype or torch.float32
    return fmt.unit_roundoff, smallest_error(dtype)
