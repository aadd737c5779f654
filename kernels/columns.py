"""The states of a speculative step: a column of slots per sequence, one for the state after each token.

The idea: a step that verifies a draft must be able to go back to any of its tokens, so it writes the state
after token t into column t of its sequence's slots, and the next step starts from the column of the last
accepted token (`capture.columns` has the canonical form). A fresh sequence (`has_initial_state` false) has
the column that it starts from zeroed first.

Read in vllm 0.19.1 and 0.33.0 fused_recurrent.py (IS_SPEC_DECODING). Leaves to others: one slot per
sequence (`slots`), what a kernel does with the columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..capture.columns import accepted_of, columns_of, start_slots
from ..capture.errors import Refused
from .slots import StateLayout


class ColumnView:
    """Pool and columns of one call in a kernel's layout, dtype and numbering."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        layout: StateLayout,
        state_dtype: str | None,
        null_slot: bool = False,
    ) -> None:
        """Lay out the states of a call; arguments as for `slots.SlotView`.

        Raises Refused for a call without columns, for a column that does not exist, and for a sequence that
        is longer than its row of columns.
        """
        self._check(tensors)
        given = tensors["pool"]
        self._tensors = tensors
        self.layout, self.null_slot = layout, null_slot
        self.slots = columns_of(tensors)
        """[N, columns] int64, canonical."""
        self.lengths = tensors["cu_seqlens"].long().diff()
        self.accepted = accepted_of(tensors)
        """[N] int64, 1 or more."""
        rows = given.to(getattr(torch, state_dtype) if state_dtype else given.dtype)
        rows = (rows.transpose(-1, -2) if layout == "VK" else rows).contiguous()
        if null_slot:
            rows = torch.cat([torch.zeros_like(rows[:1]), rows])
        self.pool = rows.clone() if rows.data_ptr() == given.data_ptr() else rows
        """[slots (+ 1), HV, K, V] or [slots (+ 1), HV, V, K]: what the kernel works on."""
        fresh = tensors.get("has_initial_state")
        if fresh is not None:
            start = self.start_slots()
            self.pool[self._rows(start[(start >= 0) & ~fresh.bool()])] = 0

    @staticmethod
    def _check(tensors: Mapping[str, Tensor]) -> None:
        if "pool" not in tensors or "slot_indices" not in tensors:
            raise Refused("a verify call needs pool and slot_indices [N, columns]; this call has them not")
        slots, accepted = columns_of(tensors), accepted_of(tensors)
        n_columns, n_slots = slots.shape[1], tensors["pool"].shape[0]
        lengths = tensors["cu_seqlens"].diff()
        if bool((slots >= n_slots).any()):
            raise Refused(f"slot_indices reach {int(slots.max())} but the pool has {n_slots} slots")
        bad = ((accepted < 1) | (accepted > n_columns)).nonzero()
        if len(bad):
            n = int(bad[0])
            raise Refused(
                f"num_accepted[{n}] is {int(accepted[n])}; a step starts from column 1..{n_columns}"
            )
        if bool((lengths > n_columns).any()):
            n = int(lengths.argmax())
            raise Refused(f"sequence {n} has {int(lengths[n])} tokens but {n_columns} columns of slots")

    def start_slots(self) -> Tensor:
        """[N] int64: the canonical slot that each sequence starts from; negative for a padded row."""
        return start_slots(self._tensors)

    def _rows(self, slots: Tensor) -> Tensor:
        """Rows of `pool` of canonical slots; a padding index keeps its kernel's meaning."""
        if not self.null_slot:
            return slots
        return torch.where(slots < 0, torch.zeros_like(slots), slots + 1)

    def indices(self, dtype: torch.dtype = torch.int32) -> Tensor:
        """[N, columns]: the kernel's slot index of every column."""
        return self._rows(self.slots).to(dtype).contiguous()

    def start_indices(self, dtype: torch.dtype = torch.int32) -> Tensor:
        """[N]: the kernel's slot index that each sequence starts from."""
        return self._rows(self.start_slots()).to(dtype)

    def store(self, states: Tensor) -> None:
        """Write states [N, columns, ...] in the pool's layout to the columns of tokens that there are.

        For a kernel that keeps them beside the pool; columns without a token or without a slot are left.
        """
        has_token = torch.arange(self.slots.shape[1], device=self.slots.device) < self.lengths[:, None]
        chosen = has_token & (self.slots >= 0) & (self.start_slots() >= 0)[:, None]
        self.pool[self._rows(self.slots[chosen])] = states[chosen].to(self.pool.dtype)

    def outputs(self) -> dict[str, Tensor]:
        """`pool` [slots, HV, K, V] and `final_state` [N, HV, K, V]: the column of each sequence's last token.

        A sequence without a token has the state that it would start from; a padded row has zeros.
        """
        rows = self.pool[1:] if self.null_slot else self.pool
        pool = (rows.transpose(-1, -2) if self.layout == "VK" else rows).contiguous()
        last = torch.where(self.lengths > 0, self.lengths, self.accepted) - 1
        at = self.slots.gather(1, last[:, None])[:, 0]
        final = pool[at.clamp_min(0)]
        final[at < 0] = 0
        return {"final_state": final, "pool": pool}
