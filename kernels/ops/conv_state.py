"""The convolution's past of each sequence, from whichever tensors a call has, and back into its pool.

The idea: as for the rule's state, a call has a gathered conv_state, or a pool and slots, or nothing, and
`has_initial_state` may say that a row is somebody else's. One function gathers, one writes back. A verify
step starts inside its row, which holds the draft before: how far in, `num_accepted` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor


def starting_conv_state(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """[N, D, W-1], oldest first: exact zeros for a fresh sequence and a padding index; None for no past."""
    rows = starting_rows(tensors)
    accepted = tensors.get("num_accepted")
    if rows is None or accepted is None:
        return rows
    history = tensors["conv_weight"].shape[1] - 1
    columns = (accepted.long() - 1)[:, None] + torch.arange(history, device=rows.device)
    return rows.gather(2, columns[:, None].expand(-1, rows.shape[1], -1))


def starting_rows(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """[N, D, L]: the whole row that each sequence starts from; zeros for a fresh one and a padding index."""
    state = tensors.get("conv_state")
    if state is None and "conv_pool" in tensors:
        pool = tensors["conv_pool"]
        slots = tensors.get("read_slot_indices", tensors["slot_indices"]).long()
        owned = (slots >= 0).view(-1, 1, 1)
        state = torch.where(owned, pool[slots.clamp_min(0)], torch.zeros_like(pool[:1]))
    if state is None:
        return None
    fresh = tensors.get("has_initial_state")
    if fresh is None:
        return state
    return torch.where(fresh.bool().view(-1, 1, 1), state, torch.zeros_like(state))


def left_rows(tensors: Mapping[str, Tensor], final: Tensor) -> Tensor:
    """[N, D, L]: what a call leaves in the rows of its sequences; the state itself but for a verify step.

    final: [N, D, W-1], the state after all of the call's tokens. Of a verify step row n becomes its window
    without the oldest input, then its tokens, then what stood behind them (vllm 0.33.0,
    causal_conv1d_update).
    """
    if "num_accepted" not in tensors:
        return final
    rows, window = starting_rows(tensors), starting_conv_state(tensors)
    assert rows is not None
    assert window is not None
    left, x = rows.to(final.dtype).clone(), tensors["conv_input"].to(final.dtype)
    for n, (start, stop) in enumerate(pairwise(tensors["cu_seqlens"].tolist())):
        if start < stop:
            new = torch.cat([window[n, :, 1:].to(final.dtype), x[start:stop].T], dim=1)
            left[n, :, : new.shape[1]] = new
    return left


def with_conv_pool(tensors: Mapping[str, Tensor], final: Tensor) -> dict[str, Tensor]:
    """`final_conv_state`, and `conv_pool` with the owned rows written where the call had a pool."""
    outputs = {"final_conv_state": final}
    if "conv_pool" in tensors:
        pool, slots = tensors["conv_pool"].clone(), tensors["slot_indices"].long()
        pool[slots[slots >= 0]] = final[slots >= 0].to(pool.dtype)
        outputs["conv_pool"] = pool
    return outputs
