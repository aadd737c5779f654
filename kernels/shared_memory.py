"""Dirty shared memory: before every Triton launch of a call, all multiprocessors' shared memory is filled.

The idea: shared memory keeps what the last block left there, as a rule the same kernel's own sound numbers,
so a kernel that reads a tile it never loaded looks right until another one ran in between. `JITFunction.run`
is what every launch goes through; it is replaced once, and fills first while a call asks for that. Launches
that are not Triton's are not seen, so the memory is also filled once at the call's start.

Leaves to others: the kernel that fills (`shared_fill`), fresh memory (`poison`), judging (compare).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import TracebackType
from typing import Any, Literal

import torch

from ..capture.errors import Refused

# Every byte 0xFF is NaN in each floating-point format; 0x7149 is 1e30 in bfloat16 and, twice, in float32.
WORDS = {"nan": -1, "huge": 0x71497149}
MULTIPROCESSOR_IDS = 1024  # more than any GPU has

_active: DirtySharedMemory | None = None


class DirtySharedMemory:
    """While it is entered, every launch finds shared memory full of one value. One per call."""

    def __init__(self, kind: Literal["nan", "huge"], fill: Callable[[], None] | None = None) -> None:
        """fill: what fills it; None: the GPU's. Raises Refused where there is no shared memory to fill."""
        self.kind = kind
        self.launches = 0
        self.bytes = 0
        self._seen: Any = None
        self.fill = fill or self._gpu_fill()
        self._filling = False

    def _gpu_fill(self) -> Callable[[], None]:
        if not torch.cuda.is_available():
            raise Refused("shared memory can be made dirty on a GPU only; Triton's interpreter has none")
        try:
            # By its path: it imports triton, which the process that judges must never do.
            fill = import_module("gdncheck.kernels.shared_fill").fill
        except ImportError as error:
            raise Refused(
                f"shared memory is filled by a Gluon kernel, which needs Triton 3.5 or later ({error})"
            ) from None
        properties: Any = torch.cuda.get_device_properties()
        self.bytes = int(properties.shared_memory_per_block_optin)
        self._seen = torch.zeros(MULTIPROCESSOR_IDS, dtype=torch.int32, device="cuda")
        self._multiprocessors = int(properties.multi_processor_count)
        # Twice as many blocks as there are places: one that a busy stream keeps occupied is not forgotten.
        return lambda: fill(self._seen, WORDS[self.kind], self.bytes, 2 * self._multiprocessors)

    def before_launch(self) -> None:
        """Fill, unless this is the launch that does it."""
        if self._filling:
            return
        self._filling = True
        try:
            self.fill()
        finally:
            self._filling = False
        self.launches += 1

    def __enter__(self) -> DirtySharedMemory:
        global _active
        install()
        self.before_launch()
        self.launches = 0
        _active = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        _active = None

    def evidence(self) -> dict[str, Any]:
        """`shared_memory`: with what, before how many launches, how many bytes on which multiprocessors."""
        found: dict[str, Any] = {"filled_with": self.kind, "launches": self.launches, "bytes": self.bytes}
        if self._seen is not None:
            reached = int((self._seen > 0).sum())
            found["multiprocessors"] = f"{reached} of {self._multiprocessors}"
        return {"shared_memory": found}


def install(launcher: Any = None) -> None:
    """Replace the method that launches Triton kernels, once; it launches as before outside a dirty call.

    launcher: a class with `run(..., warmup=)`; None: Triton's, where something has imported it.
    """
    if launcher is None:
        module = sys.modules.get("triton.runtime.jit")
        if module is None:
            return
        launcher = module.JITFunction
    if hasattr(launcher.run, "__gdncheck_original__"):
        return
    stock = launcher.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _active is not None and not kwargs.get("warmup"):
            _active.before_launch()
        return stock(self, *args, **kwargs)

    run.__gdncheck_original__ = stock  # type: ignore[attr-defined]
    launcher.run = run
