"""How many CPU threads a verdict may use: one for a small case.

The idea: on a few hundred tokens every operation is shorter than the barrier that ends it, and on a busy
machine a second thread makes the whole verdict a hundred times slower (measured: 0.1 s against 10 s at 200
tokens and 4 heads on 2 loaded cores). Large cases gain from all threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Entries of the values (T HV V) from which an operation outlasts its barrier.
LARGE_ENTRIES = 1 << 22


@contextmanager
def threads_for(entries: int) -> Iterator[None]:
    """Limit torch's threads while working on a case with so many values."""
    if entries >= LARGE_ENTRIES:
        yield
        return
    with one_thread():
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """For work in blocks that fit a cache: 48 million entries are compared in 0.25 s by one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
