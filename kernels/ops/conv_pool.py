"""The state of a convolution's call as kernels hold it: rows of a pool, in their width, order and strides.

The idea: the canonical state is [N, D, W-1] or a pool [slots, D, L], oldest input first. Kernels keep W-1 or
W columns, with the channels or the columns side by side in memory, and some never touch row 0. A
`ConvPool` is the state of one call laid out for one kernel, changed in place by it, and read back. What a
sequence starts from and where it leaves its state are two indices, the same one unless the call says so.

Leaves to others: what a kernel does with the pool; the check of the call (`conv_call`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...capture.errors import Refused

# Bits that no test writes: row 0 of a pool whose row 0 is nobody's must keep them.
NULL_ROW = -7.25


class ConvPool:
    """The pool of one call in a kernel's layout."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        columns: int | None = None,
        channels_last: bool,
        null_row: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Lay out the state of a call.

        tensors: canonical: `conv_pool` [slots, D, L] with `slot_indices` [N] and maybe `read_slot_indices`
        [N], or `conv_state` [N, D, W-1], or neither; `has_initial_state` [N].
        columns: the kernel's state width; more than the canonical one puts zeros before the oldest input;
        None keeps it. channels_last: a row's channels lie side by side in memory, else its columns do.
        null_row: row 0 is nobody's, so slot s is row s + 1 and a padding index row 0.
        Raises Refused for indices outside the pool.
        """
        x, weight = tensors["conv_input"], tensors["conv_weight"]
        self.n_sequences = tensors["cu_seqlens"].shape[0] - 1
        self.given_pool, self.null_row = "conv_pool" in tensors, null_row
        given = tensors.get("conv_pool", tensors.get("conv_state"))
        self.starts_from_zeros = given is None
        if given is None:
            given = x.new_zeros((self.n_sequences, x.shape[1], weight.shape[1] - 1))
        own = torch.arange(self.n_sequences, device=x.device)
        self.slots = tensors["slot_indices"].long() if self.given_pool else own
        self.read_slots = tensors.get("read_slot_indices", self.slots).long()
        for indices in (self.slots, self.read_slots):
            if bool((indices >= given.shape[0]).any()):
                raise Refused(f"slot indices reach {int(indices.max())} but there are {given.shape[0]} slots")
        self.length = given.shape[2]
        """Columns of the canonical state."""
        self.fresh = self._fresh(tensors.get("has_initial_state"))
        """[N] bool: the sequence starts from zeros whatever its slot holds."""
        columns = self.length if columns is None else columns
        self.pool = self._laid_out(given, columns, channels_last, dtype or given.dtype)
        """[slots (+ 1), D, columns]: what the kernel works on."""

    @property
    def separate(self) -> bool:
        """Whether some sequence leaves its state elsewhere than where it started."""
        return not torch.equal(self.slots, self.read_slots)

    def indices(self, dtype: torch.dtype = torch.int32, *, read: bool = False) -> Tensor:
        """[N]: the kernel's row of each sequence; -1, or row 0 where that is nobody's, for a padded one."""
        slots = self.read_slots if read else self.slots
        rows = torch.where(slots < 0, torch.full_like(slots, -1), slots)
        return (rows + 1 if self.null_row else rows).to(dtype)

    def zero_fresh(self) -> None:
        """Zero the rows of sequences that start afresh, for a kernel that is not told of them."""
        owned = self.fresh & (self.read_slots >= 0)
        self.pool[self.indices(torch.int64, read=True)[owned]] = 0

    def gathered(self) -> Tensor:
        """[N, D, columns], contiguous: what each sequence starts from; zeros for fresh and padded ones."""
        rows = self.pool[self.indices(torch.int64, read=True).clamp_min(0)].contiguous()
        rows[self.fresh | (self.read_slots < 0)] = 0
        return rows

    def scatter(self, states: Tensor) -> None:
        """Write [N, D, columns] into the sequences' rows, in the pool's dtype; padded ones are dropped."""
        owned = self.slots >= 0
        self.pool[self.indices(torch.int64)[owned]] = states[owned].to(self.pool.dtype)

    def outputs(self) -> dict[str, Tensor]:
        """`final_conv_state` [N, D, L] (zeros for a padded row), and `conv_pool` where the call had one."""
        rows = self.pool[1:] if self.null_row else self.pool
        canonical = rows[:, :, rows.shape[2] - self.length :].contiguous()
        final = canonical[self.slots.clamp_min(0)]
        final[self.slots < 0] = 0
        found = {"final_conv_state": final}
        if self.given_pool:
            found["conv_pool"] = canonical
        return found

    def evidence(self) -> dict[str, bool]:
        """Whether row 0 was written, where it is nobody's."""
        if not self.null_row:
            return {}
        return {"null_row_written": not bool((self.pool[0] == NULL_ROW).all())}

    def _fresh(self, has_initial_state: Tensor | None) -> Tensor:
        if self.starts_from_zeros:
            return torch.ones_like(self.slots, dtype=torch.bool)
        if has_initial_state is None:
            return torch.zeros_like(self.slots, dtype=torch.bool)
        return ~has_initial_state.bool()

    def _laid_out(self, given: Tensor, columns: int, channels_last: bool, dtype: torch.dtype) -> Tensor:
        n_rows, n_channels, length = given.shape
        shape = (n_rows + self.null_row, n_channels, columns)
        if channels_last:
            pool = given.new_zeros((shape[0], shape[2], shape[1]), dtype=dtype).transpose(1, 2)
        else:
            pool = given.new_zeros(shape, dtype=dtype)
        pool[int(self.null_row) :, :, columns - length :] = given.to(dtype)
        if self.null_row:
            pool[0] = NULL_ROW
        return pool
