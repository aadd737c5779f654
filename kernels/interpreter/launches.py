"""The interpreter's bookkeeping per call of a device function, done once per launch instead.

Upstream (3.2 to 3.9): every call of a jitted function from a kernel, tl.sum included, walks all members
of triton.language to replace the builtins, though the launch has done so already: most of a kernel's
time. The one idea: within one launch a namespace needs replacing once. Results do not change. Also
tells whether a kernel is running (`running`), which `loops` needs.
"""

from __future__ import annotations

import inspect
from typing import Any


class _NothingReplaced:
    """The scope of a call that had nothing to replace."""

    def restore(self) -> None:
        """Nothing to put back."""


class Launches:
    """What is replaced at the moment, and how deep in launches we are."""

    def __init__(self, interpreter: Any) -> None:
        self._stock_patch = interpreter._patch_lang
        self._namespaces = (interpreter.tl, interpreter.tl.core)
        self._needs: dict[Any, frozenset[int]] = {}
        self._replaced: set[int] = set()
        self._depth = 0

    def running(self) -> bool:
        """Whether a kernel is running now."""
        return self._depth > 0

    def patch_lang(self, fn: Any) -> Any:
        """Stands in for `_patch_lang`: nothing to do where this launch has replaced the same namespaces."""
        needs = self._needs.get(fn)
        if needs is None:
            needs = self._needs[fn] = frozenset(
                id(value)
                for value in fn.__globals__.values()
                if inspect.ismodule(value) and any(value is n for n in self._namespaces)
            )
        if self._depth and needs and needs <= self._replaced:
            return _NothingReplaced()
        scope = self._stock_patch(fn)
        self._replaced |= needs
        return scope

    def launch(self, stock_call: Any) -> Any:
        """Wrap `GridExecutor.__call__`."""

        def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return stock_call(executor, *args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._replaced.clear()

        return call


def install(interpreter: Any) -> Launches:
    """Replace `_patch_lang` and `GridExecutor.__call__`; returns the bookkeeper (the same one when called again)."""
    known = getattr(interpreter, "_gdncheck_launches", None)
    if known is not None:
        return known
    launches = Launches(interpreter)
    interpreter._patch_lang = launches.patch_lang
    interpreter.GridExecutor.__call__ = launches.launch(interpreter.GridExecutor.__call__)
    interpreter._gdncheck_launches = launches
    return launches
