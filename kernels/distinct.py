"""Equal answers of one batch travel once: bits are compared where they lie, in the worker.

The idea: a kernel that is run thirty times to see whether its result moves returns thirty times the same
bytes. The worker keeps the first of each kind and says of the others whose bits they have.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEPT = 16  # kinds of answers that a batch keeps; what comes beyond is sent in full


class Distinct:
    """The answers of one batch so far."""

    def __init__(self) -> None:
        self._known: list[tuple[int, list[str], list[Tensor]]] = []

    def same_as(self, number: int, names: list[str], outputs: list[Tensor]) -> int | None:
        """Number of the earlier call that returned these very bits; None where none did."""
        for earlier, known_names, known in self._known:
            if known_names == names and all(same_bits(a, b) for a, b in zip(known, outputs, strict=True)):
                return earlier
        if len(self._known) < KEPT:
            self._known.append((number, names, [tensor.clone() for tensor in outputs]))
        return None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Same dtype, shape and bits: NaN equals itself, and +0 is not -0."""
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    if a.numel() == 0:
        return True
    return torch.equal(*(x.detach().contiguous().flatten().view(torch.uint8) for x in (a, b)))
