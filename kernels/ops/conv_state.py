"""The convolution's past of each sequence, from whichever tensors a call has, and back into its pool.

The idea: as for the rule's state, a call has a gathered conv_state, or a pool and slots, or nothing, and
`has_initial_state` may say that a row is somebody else's. One function gathers, one writes back.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def starting_conv_state(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """[N, D, W-1], oldest first: exact zeros for a fresh sequence and a padding index; None for no past."""
    state = tensors.get("conv_state")
    if state is None and "conv_pool" in tensors:
        pool, slots = tensors["conv_pool"], tensors["slot_indices"].long()
        owned = (slots >= 0).view(-1, 1, 1)
        state = torch.where(owned, pool[slots.clamp_min(0)], torch.zeros_like(pool[:1]))
    if state is None:
        return None
    fresh = tensors.get("has_initial_state")
    if fresh is None:
        return state
    return torch.where(fresh.bool().view(-1, 1, 1), state, torch.zeros_like(state))


def with_conv_pool(tensors: Mapping[str, Tensor], final: Tensor) -> dict[str, Tensor]:
    """`final_conv_state`, and `conv_pool` with the owned rows written where the call had a pool."""
    outputs = {"final_conv_state": final}
    if "conv_pool" in tensors:
        pool, slots = tensors["conv_pool"].clone(), tensors["slot_indices"].long()
        pool[slots[slots >= 0]] = final[slots >= 0].to(pool.dtype)
        outputs["conv_pool"] = pool
    return outputs
