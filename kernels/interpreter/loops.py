"""Loop variables that are tensors, as the compiler makes them.

Upstream (all versions): the interpreter runs `for i in range(n)` of a kernel with Python's own range,
so `i` is a Python int and has no `.to(tl.int64)`; fla-core 0.5 and later write that in their chunk
kernels. The cure puts a `range` into the namespace of a module where a kernel does so: while a kernel
runs it yields int32 scalar tensors, anywhere else it is Python's range.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np


class KernelRange:
    """Makes the `range` that a kernel's module is given."""

    def __init__(self, interpreter: Any, running: Callable[[], bool]) -> None:
        """running: says whether a kernel is running, that is whether a loop belongs to one."""
        self._tl, self._handle_type = interpreter.tl, interpreter.TensorHandle
        self._running = running

    def __call__(self, *bounds: Any) -> Any:
        plain = builtins.range(*bounds)
        return map(self._scalar, plain) if self._running() else plain

    def _scalar(self, number: int) -> Any:
        int32 = self._tl.int32
        return self._tl.core.tensor(self._handle_type(np.array([number], dtype=np.int32), int32), int32)


def mend(kernel_range: KernelRange, function: Any) -> bool:
    """Give the function's module a `range` if the function needs it; says whether it got one now."""
    namespace = function.__globals__
    if "range" in namespace or not casts_a_loop_variable(function):
        return False
    namespace["range"] = kernel_range
    return True


def casts_a_loop_variable(function: Any) -> bool:
    """Whether some `for NAME in range(...)` of the function calls NAME.to(...).

    Without source (a function made by exec) any function that uses both names counts.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return {"range", "to"} <= set(function.__code__.co_names)
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name) and _is_range(loop.iter):
            target = loop.target.id
            if any(_is_cast(node, target) for node in ast.walk(loop)):
                return True
    return False


def _is_range(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"


def _is_cast(node: ast.AST, name: str) -> bool:
    """Is this `name.to`?"""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "to"
        and isinstance(node.value, ast.Name)
        and node.value.id == name
    )
