"""Puts modules into sys.modules from outside: packages without their own code, and stand-ins.

The idea: an engine's kernel folders need a handful of names from the rest of it (a logger, the platform,
`triton`). A *bare* package has the real folder as its search path and runs none of the code in its
__init__, so that importing a kernel module imports that file and what it names, nothing else. A
*stand-in* holds the names that are asked for. Anything else that a kernel imports from its engine is
looked up in the real folder and, where it is not there, missed with the engine's own name in the error.

Leaves to others: which packages and names an engine needs (`vllm`, `sglang` beside this file).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ...capture.errors import CannotRun


def locate(name: str, candidates: Sequence[str], search: Sequence[str] | None = None) -> tuple[Path, str]:
    """(directory on the search path, candidate) of the first candidate file that exists.

    name: what to call the kernel's origin in the error. candidates: file paths below a directory of
    `search` (sys.path). Raises CannotRun naming what was looked for.
    """
    for directory in sys.path if search is None else search:
        for candidate in candidates:
            if directory and (Path(directory) / candidate).is_file():
                return Path(directory), candidate
    raise CannotRun(
        f"{name}: the layout of its kernels is unknown; looked for {' and '.join(candidates)} "
        f"(gdncheck kernels fetch {name}@VERSION, or give a source tree by @path:DIR)"
    )


def bare_package(name: str, folder: Path) -> ModuleType:
    """A package whose submodules are the files of `folder` and whose own code does not run."""
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
    module.__spec__.submodule_search_locations = module.__path__
    _register(name, module)
    return module


def bare_packages(root: Path, dotted: str) -> None:
    """Every package from the top one down to `dotted`, bare, below `root`."""
    parts = dotted.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        if name not in sys.modules:
            bare_package(name, root.joinpath(*parts[:depth]))


def stand_in(name: str, /, **members: Any) -> ModuleType:
    """A module of the given name that has just these members."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, loader=None)
    vars(module).update(members)
    _register(name, module)
    return module


def _register(name: str, module: ModuleType) -> None:
    """Enter a module where imports look for it: sys.modules and its parent's attributes."""
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)


def missing_part(error: ModuleNotFoundError, engine: str) -> CannotRun:
    """The one line for a kernel file that imports a part of its engine that nothing stands in for."""
    return CannotRun(
        f"{engine}: its kernel files import {error.name}, which is neither among them nor stood in for; "
        f"this version's layout is unknown (kernels/standins says what is there)"
    )
