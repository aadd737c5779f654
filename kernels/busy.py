"""A second stream that keeps the GPU busy while a kernel runs.

The idea: a race often needs company: multiprocessors that start a kernel's programs late or in another
order. Matrix products on a stream of their own give it that and touch no memory of the kernel's; how many
were launched meanwhile is the proof that it had company.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch

EDGE = 2048  # rows of a product: all multiprocessors of a large GPU for some 50 microseconds
AHEAD = 4  # launches between two waits, so that the queue never runs far ahead


class BusyStream:
    """`with BusyStream(device):` keeps the stream busy; on a CPU it does nothing and counts nothing."""

    def __init__(self, device: str) -> None:
        self.launches = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True) if device == "cuda" else None

    def __enter__(self) -> BusyStream:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            if error is None:
                torch.cuda.current_stream().synchronize()
            self._stop.set()
            self._thread.join()

    def _work(self) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            square = torch.ones(EDGE, EDGE, device="cuda", dtype=torch.bfloat16)
            product = torch.zeros_like(square)
            while not self._stop.is_set():
                for _ in range(AHEAD):
                    torch.mm(square, square, out=product)
                    self.launches += 1
                stream.synchronize()

    def evidence(self) -> dict[str, Any]:
        return {"busy_stream": self.launches}
