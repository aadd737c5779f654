"""Sees every buffer that Python code allocates without filling it, before the code does.

The idea: torch's allocating functions are wrapped once, before a kernel's package can bind them by name;
they do nothing more until `fresh_buffers` gives them handlers, each of which may fill or replace the
buffer.

Leaves to others: what is done with a buffer (`poison`, `guard`). Memory that compiled code allocates for
itself is not reachable from here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Handler = Callable[[Tensor], Tensor]

ALLOCATORS = (
    (torch, ("empty", "empty_like", "empty_strided", "empty_permuted")),
    (Tensor, ("new_empty", "new_empty_strided")),
)

_handlers: tuple[Handler, ...] = ()


def install() -> None:
    """Wrap torch's allocating functions, once; they behave as before outside `fresh_buffers`."""
    for owner, names in ALLOCATORS:
        for name in names:
            original = getattr(owner, name, None)
            if original is not None and not hasattr(original, "__gdncheck_original__"):
                setattr(owner, name, _wrapped(original))


def uninstall() -> None:
    """Give torch its own functions back."""
    for owner, names in ALLOCATORS:
        for name in names:
            wrapper = getattr(owner, name, None)
            original = getattr(wrapper, "__gdncheck_original__", None)
            if original is not None:
                setattr(owner, name, original)


@contextmanager
def fresh_buffers(handlers: Sequence[Handler]) -> Iterator[None]:
    """Pass every fresh buffer through the handlers, in order; needs `install`."""
    global _handlers
    before, _handlers = _handlers, tuple(handlers)
    try:
        yield
    finally:
        _handlers = before


def _wrapped(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def allocate(*args: Any, **kwargs: Any) -> Tensor:
        global _handlers
        tensor = original(*args, **kwargs)
        # An `out=` buffer is the caller's own, not fresh; one on `meta` has no memory.
        if not _handlers or kwargs.get("out") is not None or tensor.numel() == 0 or tensor.is_meta:
            return tensor
        handlers, _handlers = _handlers, ()  # what a handler allocates is its own
        try:
            for handler in handlers:
                tensor = handler(tensor)
        finally:
            _handlers = handlers
        return tensor

    allocate.__gdncheck_original__ = original  # type: ignore[attr-defined]
    return allocate
