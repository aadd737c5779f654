"""Loop variables that are tensors, as the compiler makes them.

Upstream (all versions): the interpreter runs `for i in range(n)` of a kernel with Python's own range,
so `i` is a Python int and has no `.to(tl.int64)`; fla-core 0.5 and later write that in their chunk
kernels. The cure puts a `range` into the module: while a kernel runs it yields int32 scalar tensors,
anywhere else it is Python's range.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from types import ModuleType
from typing import Any

import numpy as np


def install(interpreter: Any, modules: list[ModuleType], running: Any) -> list[str]:
    """Give each module that needs it a `range`; `running()` says whether a kernel is running.

    Returns the names of the modules that were changed.
    """
    tl, handle_type = interpreter.tl, interpreter.TensorHandle

    class KernelRange:
        """Python's range outside kernels; inside, the same numbers as int32 scalar tensors."""

        def __new__(cls, *bounds: Any) -> Any:
            plain = builtins.range(*bounds)
            return map(_scalar, plain) if running() else plain

    def _scalar(number: int) -> Any:
        return tl.core.tensor(handle_type(np.array([number], dtype=np.int32), tl.int32), tl.int32)

    changed = []
    for module in modules:
        if "range" not in vars(module) and casts_a_loop_variable(module):
            module.range = KernelRange  # type: ignore[attr-defined]
            changed.append(module.__name__)
    return changed


def casts_a_loop_variable(module: ModuleType) -> bool:
    """Whether some `for NAME in range(...)` of the module's source calls NAME.to(...)."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return False
    for loop in ast.walk(tree):
        if not (isinstance(loop, ast.For) and isinstance(loop.target, ast.Name) and _is_range(loop.iter)):
            continue
        for node in ast.walk(loop):
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "to"
                and isinstance(node.value, ast.Name)
                and node.value.id == loop.target.id
            ):
                return True
    return False


def _is_range(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"
