"""A grid function sees the launch's own arguments, as the compiler shows them.

Upstream (Triton 3.2 to 3.9): the compiler calls `grid(META)` with the arguments as they were passed, and
launches with what the function left in META; the interpreter has turned every tensor into a pointer by
then. A launcher that fills an index tensor there (vLLM's conv counts its programs so) fails on a pointer
that has no `nelement`. The cure calls the function with the arguments themselves and converts what it
replaced or moved. Tensors that are not on the CPU keep the stock way: their host copies exist already.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def with_arguments(interpreter: Any, executor: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The executor's grid for this launch: itself where it is fixed, else the function as described."""
    stock: Callable[[dict[str, Any]], Any] = executor.grid
    if not callable(stock):
        return stock

    def grid(converted: dict[str, Any]) -> Any:
        given = inspect.getcallargs(executor.fn, *args, **kwargs)
        if any(_elsewhere(value) for value in given.values()):
            return stock(converted)
        before = {name: (value, _address(value)) for name, value in given.items()}
        result = stock(given)
        for name, value in given.items():
            was, address = before.get(name, (None, None))
            if value is not was or _address(value) != address:
                converted[name] = interpreter._implicit_cvt(value)
        # A pointer owns nothing: what the function made lives as long as the launch.
        executor._gdncheck_arguments = given
        return result

    return grid


def _elsewhere(value: Any) -> bool:
    device = getattr(value, "device", None)
    return hasattr(value, "data_ptr") and getattr(device, "type", "cpu") != "cpu"


def _address(value: Any) -> int | None:
    return value.data_ptr() if hasattr(value, "data_ptr") else None
