"""Names that a kernel's module bound to Triton builtins at import, looked up late instead.

Upstream: modules such as fla-core 0.4's `fla.ops.utils.op` say `exp = tl.exp`. The interpreter replaces
the members of triton.language when a kernel starts, which such a name does not see: calling it asks
for a `_semantic` (Triton 3.2: `_builder`) that nobody passes. The cure, when a function of that module
first runs: the name becomes a function that looks the member up at every call.
"""

from __future__ import annotations

import inspect
from typing import Any


def mend(tl: Any, namespace: dict[str, Any]) -> list[str]:
    """Replace names for tl builtins in a module's namespace; returns the names. Harmless when repeated."""
    changed = []
    for name, member in list(namespace.items()):
        if inspect.isroutine(member) and tl.core.is_builtin(member):
            home = _home(tl, member)
            if home is not None:
                namespace[name] = _looked_up_when_called(*home)
                changed.append(name)
    return changed


def _home(tl: Any, member: Any) -> tuple[Any, str] | None:
    """The namespace that the interpreter patches and the name under which it holds this builtin."""
    own_name = getattr(member, "__name__", "")
    for namespace in (tl, tl.math, tl.core):
        for name in (own_name, own_name.lstrip("_")):
            if getattr(namespace, name, None) is not None:
                return namespace, name
    return None


def _looked_up_when_called(namespace: Any, name: str) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return getattr(namespace, name)(*args, **kwargs)

    forward.__name__ = name
    return forward
