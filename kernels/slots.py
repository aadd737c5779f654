"""The state of a call as engines hold it: rows of a pool, addressed by index, in the engine's own layout.

The idea: an engine does not hand a kernel one state per sequence; it has a pool of slots and a list that
says which slot is whose. A `SlotView` is that pool for one call: made from the canonical tensors (a pool
and slot_indices, or an initial_state, or nothing), changed in place by the kernel, and read back into the
canonical layout. Fresh sequences (`has_initial_state` false) get a zeroed slot first, as the engines do.

Leaves to others: what a kernel does with the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ..capture.errors import Refused

StateLayout = Literal["KV", "VK"]


class SlotView:
    """The pool of one call in a kernel's layout and dtype."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        layout: StateLayout,
        state_dtype: str | None,
        null_slot: bool = False,
    ) -> None:
        """Lay out the state of a call.

        tensors: canonical (`pool` [slots, HV, K, V] with `slot_indices` [N], or `initial_state`
        [N, HV, K, V], or neither; `has_initial_state` [N]).
        layout: order of the last two dimensions in the kernel's pool.
        state_dtype: dtype of the pool; None keeps the given one, float32 where nothing is given.
        null_slot: the kernel never reads or writes slot 0, so the canonical slot s is its slot s + 1
        and a padding index becomes 0.
        Raises Refused for indices outside the pool.
        """
        v = tensors["v"]
        n_sequences = tensors["cu_seqlens"].shape[0] - 1
        self.layout, self.null_slot, self.given_pool = layout, null_slot, "pool" in tensors
        given = tensors.get("pool", tensors.get("initial_state"))
        dtype = (
            getattr(torch, state_dtype) if state_dtype else torch.float32 if given is None else given.dtype
        )
        if given is None:
            given = torch.zeros(n_sequences, v.shape[1], tensors["k"].shape[-1], v.shape[-1], device=v.device)
        own = torch.arange(n_sequences, device=v.device)
        self.slots = _one_each(tensors["slot_indices"].long()) if self.given_pool else own
        if bool((self.slots >= given.shape[0]).any()):
            raise Refused(
                f"slot_indices reach {int(self.slots.max())} but the pool has {given.shape[0]} slots"
            )
        rows = given.to(dtype)
        rows = (rows.transpose(-1, -2) if layout == "VK" else rows).contiguous()
        if null_slot:
            rows = torch.cat([torch.zeros_like(rows[:1]), rows])
        self.pool = rows.clone() if rows.data_ptr() == given.data_ptr() else rows
        """[slots (+ 1), HV, K, V] or [slots (+ 1), HV, V, K]: what the kernel works on."""
        self._zero_fresh(tensors.get("has_initial_state"))

    def _zero_fresh(self, has_initial_state: Tensor | None) -> None:
        if has_initial_state is None:
            return
        owned = self.slots >= 0
        self.pool[self._rows()[owned & ~has_initial_state.bool()]] = 0

    def _rows(self) -> Tensor:
        """Row of `pool` of each sequence [N] int64; a padding index keeps its kernel's meaning."""
        if not self.null_slot:
            return self.slots
        return torch.where(self.slots < 0, torch.zeros_like(self.slots), self.slots + 1)

    def indices(self, dtype: torch.dtype = torch.int32) -> Tensor:
        """The kernel's slot index of each sequence [N]."""
        return self._rows().to(dtype)

    def columns(self, n_columns: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """[N, n_columns]: every token of a sequence mapped to the sequence's one slot."""
        return self.indices(dtype)[:, None].expand(-1, max(n_columns, 1)).contiguous()

    def gathered(self) -> Tensor:
        """[N, HV, ...]: a copy of each sequence's row, as a prefill that gathers its state takes it.

        Raises Refused for a padding index: prefill has no padded rows.
        """
        if bool((self.slots < 0).any()):
            raise Refused("a negative slot index marks a padded decode row; a prefill call has none")
        return self.pool[self._rows()].contiguous()

    def scatter(self, states: Tensor) -> None:
        """Write one row per sequence back, rounded to the pool's dtype."""
        self.pool[self._rows()] = states.to(self.pool.dtype)

    def outputs(self) -> dict[str, Tensor]:
        """`final_state` [N, HV, K, V] (zeros for a padded row), and `pool` where the call had one."""
        rows = self.pool[1:] if self.null_slot else self.pool
        canonical = rows.transpose(-1, -2) if self.layout == "VK" else rows
        final = canonical[self.slots.clamp_min(0)].contiguous()
        final[self.slots < 0] = 0
        found = {"final_state": final}
        if self.given_pool:
            found["pool"] = canonical.contiguous()
        return found


def _one_each(slots: Tensor) -> Tensor:
    """slot_indices as [N]. Raises Refused for a verify step's columns, of which there are several."""
    if slots.dim() == 2 and slots.shape[1] == 1:
        return slots[:, 0]
    if slots.dim() == 2:
        raise Refused(
            f"slot_indices has {slots.shape[1]} columns per sequence; this kernel keeps one state for each"
        )
    return slots
