"""Poisoned memory: what Python code allocates and does not fill holds NaN or huge values, not leftovers.

The idea: fresh memory is usually zero or a former tensor, so a kernel that reads a row nobody wrote looks
right most of the time. The allocating functions of torch are wrapped once, before a kernel's package can
bind them by name; inside `poisoned(...)` each new buffer is filled and counted, and the count is the proof
that the axis was exercised.

Leaves to others: memory that compiled code allocates for itself (not reachable from here).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

Poison = Literal["nan", "huge"]

HUGE = 1e30  # finite in float32 and bfloat16; a square overflows, as a stale state of that size would
ALLOCATORS = (
    (torch, ("empty", "empty_like", "empty_strided", "empty_permuted")),
    (Tensor, ("new_empty", "new_empty_strided")),
)


class PoisonCount:
    """How much was poisoned while it was on."""

    def __init__(self, kind: Poison) -> None:
        self.kind = kind
        self.buffers = 0
        self.bytes = 0

    def fill(self, tensor: Tensor) -> None:
        """Fill one fresh buffer; integers and bools get their largest value."""
        if tensor.numel() == 0 or tensor.is_meta:
            return
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            largest = torch.finfo(tensor.dtype).max
            tensor.fill_(float("nan") if self.kind == "nan" else min(HUGE, largest))
        elif tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
        self.buffers += 1
        self.bytes += tensor.numel() * tensor.element_size()

    def evidence(self) -> dict[str, Any]:
        return {"poison": self.kind, "poisoned_buffers": self.buffers, "poisoned_bytes": self.bytes}


_active: PoisonCount | None = None


def install() -> None:
    """Wrap torch's allocating functions, once; they behave as before outside `poisoned`."""
    for owner, names in ALLOCATORS:
        for name in names:
            original = getattr(owner, name, None)
            if original is not None and not hasattr(original, "__gdncheck_original__"):
                setattr(owner, name, _poisoning(original))


def uninstall() -> None:
    """Give torch its own functions back."""
    for owner, names in ALLOCATORS:
        for name in names:
            wrapper = getattr(owner, name, None)
            if hasattr(wrapper, "__gdncheck_original__"):
                setattr(owner, name, wrapper.__gdncheck_original__)


@contextmanager
def poisoned(kind: Poison) -> Iterator[PoisonCount]:
    """Poison every buffer that Python code allocates inside; needs `install`."""
    global _active
    _active = PoisonCount(kind)
    try:
        yield _active
    finally:
        _active = None


def _poisoning(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def allocate(*args: Any, **kwargs: Any) -> Tensor:
        tensor = original(*args, **kwargs)
        # An `out=` buffer is the caller's own, not fresh.
        if _active is not None and kwargs.get("out") is None:
            _active.fill(tensor)
        return tensor

    allocate.__gdncheck_original__ = original  # type: ignore[attr-defined]
    return allocate
