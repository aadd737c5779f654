"""Scalars of the interpreter as Python numbers, with any numpy.

Upstream: a scalar in the interpreter is an array of one element, and Triton before 3.9 makes an index
of it by `int(array)`, which numpy 2.4 and later refuse for arrays with dimensions. The cure asks the
array for its one item. Where `int(array)` works the result is the same.
"""

from __future__ import annotations

from typing import Any


def install(interpreter: Any) -> None:
    """Wrap `_patch_lang_tensor`, which gives tensors their Python protocol at every kernel launch."""
    stock = interpreter._patch_lang_tensor
    if getattr(stock, "_gdncheck", False):
        return

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        stock(tensor, *scope)
        # Not through the scope: the stock call has recorded the originals of both names already.
        tensor.__index__ = as_index
        tensor.__bool__ = as_bool

    patch_lang_tensor._gdncheck = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch_lang_tensor


def as_index(tensor: Any) -> int:
    """The integer in a scalar tensor; raises TypeError for blocks, as the stock method does."""
    data = tensor.handle.data
    if data.size != 1:
        raise TypeError(f"a block of shape {data.shape} cannot be used as an index; only scalar tensors can")
    return int(data.item())


def as_bool(tensor: Any) -> bool:
    """Truth of a scalar tensor; blocks count as true, as upstream has it."""
    data = tensor.handle.data
    return bool(data.item()) if data.size == 1 else True
