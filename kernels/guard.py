"""Guard bands: every input and every fresh buffer lies between two bands that nobody owns.

The idea: a kernel that runs over an end usually hits its neighbour in the allocator's pool, or padding,
and nobody sees it. Between bands of known bytes an access past the end is told from both sides: a write
changes the band, a read gets NaN (the bytes are all ones, which is NaN in every floating-point format and
-1 in every integer).

Leaves to others: finding fresh buffers (`allocation`), judging NaN in the outputs (compare).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BAND = 64 * 1024  # bytes on each side: several rows of 32 heads x 128 float32
FILL = 0xFF


class Guards:
    """The guarded buffers of one call. Called with a fresh buffer, returns one of its kind between bands."""

    def __init__(self) -> None:
        self._buffers: list[tuple[str, Tensor, int]] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.requires_grad:
            return tensor
        shape = "x".join(str(extent) for extent in tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return self.guarded(f"fresh buffer {len(self._buffers)} ({dtype} {shape})", tensor)

    def guarded(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of a tensor, contiguous, between two bands."""
        n_bytes = tensor.numel() * tensor.element_size()
        buffer = torch.full((BAND + n_bytes + BAND,), FILL, dtype=torch.uint8, device=tensor.device)
        inside = buffer[BAND : BAND + n_bytes].view(tensor.dtype).view(tensor.shape)
        inside.copy_(tensor)
        self._buffers.append((name, buffer, n_bytes))
        return inside

    def evidence(self) -> dict[str, Any]:
        """`guarded_buffers`, and `guard_written`: for each band that changed, where and how far."""
        written = []
        for name, buffer, n_bytes in self._buffers:
            before = (buffer[:BAND] != FILL).nonzero()
            after = (buffer[BAND + n_bytes :] != FILL).nonzero()
            if len(before):
                written.append({"buffer": name, "side": "before", "bytes": BAND - int(before[0])})
            if len(after):
                written.append({"buffer": name, "side": "after", "bytes": int(after[-1]) + 1})
        return {"guarded_buffers": len(self._buffers), "guard_written": written}
