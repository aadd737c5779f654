"""The interpreter's bookkeeping per launch: mend a kernel's module once, replace builtins once.

Upstream (Triton 3.2 to 3.9): every call of a jitted function from a kernel, tl.sum included, walks all
members of triton.language to replace the builtins, though the launch has done so already: most of a
kernel's time. The one idea: within one launch a namespace needs replacing once. It is also the place
where every function that a kernel runs passes by first, so modules are mended here (`bindings`,
`loops`) whenever they were imported, and a launch's grid is (`grids`). Results do not change.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from . import bindings, grids, loops


class _NothingReplaced:
    """The scope of a call that had nothing to replace."""

    def restore(self) -> None:
        """Nothing to put back."""


class Launches:
    """What is replaced at the moment, how deep in launches we are, and what was mended so far."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter = interpreter
        self._stock_patch = interpreter._patch_lang
        self._tl = interpreter.tl
        self._range = loops.KernelRange(interpreter, self.running)
        self._needs: dict[Any, frozenset[int]] = {}
        self._replaced: set[int] = set()
        self._depth = 0
        self.rebound: list[str] = []
        """`module.name` of every late look-up."""
        self.tensor_loops: list[str] = []
        """Modules whose loops yield tensors."""

    def running(self) -> bool:
        """Whether a kernel is running now."""
        return self._depth > 0

    def patch_lang(self, fn: Any) -> Any:
        """Stands in for `_patch_lang`: nothing to do where this launch has replaced the same namespaces."""
        needs = self._needs.get(fn)
        if needs is None:
            needs = self._needs[fn] = self._first_sight(fn)
        if self._depth and needs and needs <= self._replaced:
            return _NothingReplaced()
        scope = self._stock_patch(fn)
        self._replaced |= needs
        return scope

    def rebind(self, module: str, namespace: dict[str, Any]) -> None:
        """Let the module's names for Triton's builtins find what the interpreter put in their place."""
        self.rebound += [f"{module}.{name}" for name in bindings.mend(self._tl, namespace)]

    def _first_sight(self, fn: Any) -> frozenset[int]:
        """Mend the function's module; returns the ids of the namespaces of Triton that it uses."""
        module = getattr(fn, "__module__", "?")
        self.rebind(module, fn.__globals__)
        if loops.mend(self._range, fn):
            self.tensor_loops.append(module)
        used = (value for value in fn.__globals__.values() if inspect.ismodule(value))
        return frozenset(id(value) for value in used if value is self._tl or value is self._tl.core)

    def launch(self, stock_call: Any) -> Any:
        """Wrap `GridExecutor.__call__`."""

        def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
            # Triton 3.2 lets compiler options through that no kernel has as an argument.
            kwargs = {name: value for name, value in kwargs.items() if name in executor.arg_names}
            executor.grid = grids.with_arguments(self._interpreter, executor, args, kwargs)
            self._depth += 1
            try:
                # A kernel's masked lanes divide by zero and overflow as a matter of course.
                with np.errstate(all="ignore"):
                    return stock_call(executor, *args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._replaced.clear()

        return call


def install(interpreter: Any) -> Launches:
    """Replace `_patch_lang` and `GridExecutor.__call__`; returns the bookkeeper, one per process."""
    known: Launches | None = getattr(interpreter, "_gdncheck_launches", None)
    if known is not None:
        return known
    launches = Launches(interpreter)
    interpreter._patch_lang = launches.patch_lang
    interpreter.GridExecutor.__call__ = launches.launch(interpreter.GridExecutor.__call__)
    interpreter._gdncheck_launches = launches
    return launches
