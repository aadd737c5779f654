"""A `torch.cpu.device` for kernel packages that enter the device of their tensors.

Upstream: fla-core 0.4 on a machine without a GPU takes `torch.cpu` for its device module and opens
`torch.cpu.device(index)` around every call; torch (all versions so far) has no such context. The cure
is one that does nothing: there is one CPU. A torch that brings its own keeps it.
"""

from __future__ import annotations

import contextlib
from typing import Any


class CpuDevice(contextlib.nullcontext):  # type: ignore[type-arg]
    """Does what `torch.cuda.device(index)` does, for the one CPU there is: nothing."""

    def __init__(self, index: Any = None) -> None:
        super().__init__(None)


def install(torch: Any) -> bool:
    """Add `torch.cpu.device` where it is missing; says whether it was."""
    if hasattr(torch.cpu, "device"):
        return False
    torch.cpu.device = CpuDevice
    return True
