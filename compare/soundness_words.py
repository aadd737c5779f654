"""Where a packed row lies: the sequence it belongs to and its token there."""

from __future__ import annotations

from torch import Tensor


def locate(cu_seqlens: Tensor, row: int) -> tuple[int, int]:
    """(sequence, token inside it) of a packed row."""
    sequence = int((cu_seqlens[1:] > row).nonzero()[0])
    return sequence, row - int(cu_seqlens[sequence])
