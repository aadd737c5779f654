"""Applies the shims in order and keeps the account of what was done.

The one idea: what concerns Triton is replaced once, before any kernel module exists; what concerns a
kernel package is mended in its loaded modules afterwards. Each cure lives in a module of its own
(`builder`, `scalars`, `launches`, `loops`, `imports`, and `kernels.autotune`); versions are told there.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from ...capture.errors import CannotRun
from .. import autotune

OLDEST_TRITON = (3, 2)

_report: dict[str, Any] = {}


def install(triton_version: str | None = None) -> dict[str, Any]:
    """Set TRITON_INTERPRET=1, import triton and mend its interpreter. Returns `describe()`.

    triton_version: refuse any other installed version (None takes what there is).
    Raises CannotRun where triton is missing, too old, another version, or was imported compiled.
    """
    if "triton" in sys.modules and not _interpreting(sys.modules["triton"]):
        raise CannotRun(
            "triton was imported before its interpreter was asked for; start a fresh process and call "
            "gdncheck.kernels.interpreter.install() first"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
        from triton.runtime import interpreter
    except ImportError as error:
        raise CannotRun(f"triton is not installed here ({error}); run: pip install 'triton>=3.2'") from None
    _check_version(triton.__version__, triton_version)
    from . import builder, launches, scalars

    builder.install(interpreter)
    scalars.install(interpreter)
    launches.install(interpreter)
    autotune.install(cut_to_one=True)
    _report.update(interpreted=True, triton=triton.__version__)
    _report.setdefault("rebound", [])
    _report.setdefault("tensor_loops", [])
    return describe()


def after_import(modules: list[ModuleType] | None = None, package: str = "fla") -> dict[str, Any]:
    """Mend what `modules` bound at import; None takes every loaded module of `package`. Returns `describe()`.

    Does nothing where `install` was not called: compiled kernels need no mending.
    """
    if not _report:
        return describe()
    from triton.runtime import interpreter

    from . import imports, launches, loops

    if modules is None:
        loaded = list(sys.modules.items())
        modules = [m for name, m in loaded if name.split(".")[0] == package and isinstance(m, ModuleType)]
    _report["rebound"] += imports.install(interpreter, modules)
    _report["tensor_loops"] += loops.install(interpreter, modules, launches.install(interpreter).running)
    return describe()


def describe() -> dict[str, Any]:
    """What is in force: interpreted or not, Triton's version, names rebound, modules given tensor loops."""
    return {"interpreted": bool(_report), **_report}


def _interpreting(triton: Any) -> bool:
    """Whether a loaded triton makes interpreted functions."""
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
        raise CannotRun(
            f"triton {found} is installed but {wanted} was asked for; run: pip install triton=={wanted}"
        )
