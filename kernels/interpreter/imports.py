"""What fla modules bound or chose when they were imported, put right for the interpreter.

Upstream, fla-core 0.4 (the cure is applied by what is found, not by version):
- `fla.utils.custom_device_ctx` calls `torch.cpu.device`, which does not exist;
- `exp = tl.exp` and the like keep the builtin as it was before the interpreter replaced tl's members,
  so calling it asks for a `_semantic` (Triton 3.2: `_builder`) that nobody passes.
The cure for the second is a function of the same name that looks the member up when it is called.
"""

from __future__ import annotations

import contextlib
import inspect
from types import ModuleType
from typing import Any


def install(interpreter: Any, modules: list[ModuleType]) -> list[str]:
    """Rebind what needs it in the given modules. Returns `module.name` of everything changed."""
    changed = []
    for module in modules:
        changed += _rebind_builtins(interpreter.tl, module)
        changed += _device_context(module)
    return changed


def _rebind_builtins(tl: Any, module: ModuleType) -> list[str]:
    """Replace the module's names for tl builtins by late look-ups."""
    changed = []
    for name, member in list(vars(module).items()):
        if inspect.isroutine(member) and tl.core.is_builtin(member):
            home = _home(tl, member)
            if home is not None:
                setattr(module, name, _looked_up_when_called(*home))
                changed.append(f"{module.__name__}.{name}")
    return changed


def _home(tl: Any, member: Any) -> tuple[Any, str] | None:
    """The tl namespace that the interpreter patches and the name under which it holds this builtin."""
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


def _device_context(module: ModuleType) -> list[str]:
    """Make `custom_device_ctx` a no-op: the interpreter computes on the CPU whatever the device."""
    if "custom_device_ctx" not in vars(module):
        return []

    def custom_device_ctx(index: int | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    module.custom_device_ctx = custom_device_ctx  # type: ignore[attr-defined]
    return [f"{module.__name__}.custom_device_ctx"]
