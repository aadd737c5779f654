"""The layer's causal depthwise convolution in float64, packed, with its state in and out.

The one idea: y_t = sum_j weight[:, j] * x_(t - (W-1) + j) + bias is W shifted products; only a
sequence's first W-1 tokens look outside it, and those rows read the conv state instead of the tokens
that lie before them in the packing. The split of the channels into q, k, v is the caller's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .gate import silu
from .packing import sequence_bounds

# Tokens times channels worked on at once, so that memory beyond inputs and outputs is bounded.
BLOCK_ENTRIES = 1 << 22


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    conv_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str | None = "silu",
) -> tuple[Tensor, Tensor]:
    """Convolve each packed sequence, and hand its last W-1 inputs on.

    x: [T, D]; weight: [D, W], the last tap meets the current token; bias: [D] or None; conv_state:
    [N, D, W-1], oldest input first, None is zeros; cu_seqlens: [N+1] int, None is one sequence;
    activation: "silu", "swish" or None. Any dtype, one device.
    Returns float64 (y [T, D], final conv state [N, D, W-1]); a sequence shorter than W-1 keeps the
    newest part of its old state, an empty one all of it. Raises ValueError for shapes that do not fit.
    """
    if activation not in ("silu", "swish", None):
        raise ValueError(f'activation must be "silu", "swish" or None, got {activation!r}')
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] == 0:
        raise ValueError(
            f"x must be [T, D] and weight [D, W >= 1], got {list(x.shape)}, {list(weight.shape)}"
        )
    n_tokens, D = x.shape
    history = weight.shape[1] - 1
    bounds = sequence_bounds(cu_seqlens, n_tokens)
    n_sequences = len(bounds) - 1
    if bias is not None and tuple(bias.shape) != (D,):
        raise ValueError(f"bias must be [{D}], got {list(bias.shape)}")
    if conv_state is None:
        conv_state = x.new_zeros((n_sequences, D, history))
    elif tuple(conv_state.shape) != (n_sequences, D, history):
        raise ValueError(
            f"conv_state must be {[n_sequences, D, history]} (N, D, W-1), got {list(conv_state.shape)}"
        )
    old = conv_state.detach().to(torch.float64)
    sequence = torch.repeat_interleave(torch.arange(n_sequences), bounds.diff())
    y = torch.empty((n_tokens, D), dtype=torch.float64, device=x.device)
    taps = weight.to(torch.float64)
    block = max(1, BLOCK_ENTRIES // max(1, D))
    for start in range(0, n_tokens, block):
        stop = min(start + block, n_tokens)
        total = torch.zeros((stop - start, D), dtype=torch.float64, device=x.device)
        if bias is not None:
            total += bias.to(torch.float64)
        for lag in range(history, -1, -1):
            inputs = _inputs_before(x, old, bounds, sequence, start, stop, lag)
            total.addcmul_(inputs, taps[:, history - lag])
        y[start:stop] = total if activation is None else silu(total)
    return y, _final_state(x, old, bounds)


def final_conv_state(x: Tensor, conv_state: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """[N, D, W-1] float64: what `causal_conv` leaves behind, without its output. Arguments as there."""
    bounds = sequence_bounds(cu_seqlens, x.shape[0])
    return _final_state(x, conv_state.detach().to(torch.float64), bounds)


def _inputs_before(
    x: Tensor, old: Tensor, bounds: Tensor, sequence: Tensor, start: int, stop: int, lag: int
) -> Tensor:
    """[stop - start, D]: each token's input `lag` tokens before it in its own sequence or its state."""
    token = torch.arange(start, stop)
    row = sequence[start:stop]
    position = token - bounds[row]
    inputs = x[(token - lag).clamp_min(0).to(x.device)].to(torch.float64)
    outside = (position < lag).nonzero().flatten()
    if len(outside):
        slot = (old.shape[2] + position[outside] - lag).to(x.device)
        inputs[outside.to(x.device)] = old[row[outside].to(x.device), :, slot]
    return inputs


def _final_state(x: Tensor, old: Tensor, bounds: Tensor) -> Tensor:
    """[N, D, W-1]: the last W-1 of (old state, the sequence's inputs)."""
    final = torch.empty_like(old)
    for slot in range(old.shape[2]):
        back = old.shape[2] - slot
        token = bounds[1:] - back
        inside = (token >= bounds[:-1]).to(x.device)
        # Where the sequence is shorter than `back`, its old state moved up by the sequence's length.
        kept = (slot + bounds.diff()).clamp_max(old.shape[2] - 1).to(x.device)
        shifted = old[torch.arange(len(old), device=x.device), :, kept]
        if x.shape[0] == 0:
            final[:, :, slot] = shifted
            continue
        recent = x[token.clamp_min(0).to(x.device)].to(torch.float64)
        final[:, :, slot] = torch.where(inside[:, None], recent, shifted)
    return final
