"""Applies the shims in order and keeps the account of what was done.

The one idea: everything is replaced in Triton itself, once, so that a kernel's package needs no
attention: its modules are mended when their functions first run, however late they were imported. Each
cure lives in a module of its own (`builder`, `scalars`, `launches` with `bindings` and `loops`,
`devices`, `speed`, and `kernels.autotune`), which says what of upstream it mends in which versions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from ...capture.errors import CannotRun
from .. import autotune

OLDEST_TRITON = (3, 2)

_report: dict[str, Any] = {}


def install(triton_version: str | None = None) -> dict[str, Any]:
    """Set TRITON_INTERPRET=1, import triton and mend its interpreter; returns `describe()`.

    triton_version: refuse any other installed version (None takes what there is). Repeating is harmless.
    Raises CannotRun where triton is missing, too old, another version, or was imported compiled.
    """
    if "triton" in sys.modules and not _interpreting():
        raise CannotRun(
            "triton was imported before its interpreter was asked for; start a fresh process and call "
            "gdncheck.kernels.interpreter.install() first"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import torch
        import triton
        from triton.runtime import interpreter
    except ImportError as error:
        raise CannotRun(f"triton cannot be imported ({error}); run: pip install 'triton>=3.2'") from None
    _check_version(triton.__version__, triton_version)
    from . import builder, devices, launches, scalars, speed

    builder.install(interpreter)
    scalars.install(interpreter)
    speed.install(interpreter)
    autotune.install(cut_to_one=True)
    devices.install(torch)
    _report.update(triton=triton.__version__, launches=launches.install(interpreter))
    return describe()


def after_import(modules: Iterable[ModuleType]) -> dict[str, Any]:
    """Mend what the given modules bound at import now, not when their functions first run.

    Does nothing where `install` was not called: compiled kernels need no mending. Returns `describe()`.
    """
    if _report:
        launches = _report["launches"]
        for module in modules:
            launches.rebind(module.__name__, vars(module))
    return describe()


def describe() -> dict[str, Any]:
    """What is in force: interpreted or not, Triton's version, names rebound, modules given tensor loops."""
    if not _report:
        return {"interpreted": False}
    launches = _report["launches"]
    return {
        "interpreted": True,
        "triton": _report["triton"],
        "rebound": list(launches.rebound),
        "tensor_loops": list(launches.tensor_loops),
    }


def _interpreting() -> bool:
    """Whether the loaded triton makes interpreted functions."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return False
    language = sys.modules.get("triton.language")
    # tl.cdiv was jitted when triton was imported: its class tells how.
    return language is None or type(language.cdiv).__name__ == "InterpretedFunction"


def _check_version(found: str, wanted: str | None) -> None:
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if numbers < OLDEST_TRITON:
        raise CannotRun(f"triton {found} is too old for the interpreter shims; they need 3.2 or later")
    if wanted is not None and found != wanted:
        raise CannotRun(f"triton {found} is installed, not {wanted}; run: pip install triton=={wanted}")
