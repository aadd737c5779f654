"""Where a worker finds modules: version caches first, the user's directories last, our own folders never.

The idea: a worker starts with PYTHONSAFEPATH, so the current directory is not on sys.path, yet
`--kernel module:function` must find the user's module there. A finder at the very end of sys.meta_path
looks in those directories, and passes over anything that is a folder of gdncheck itself: run from the
root of its repository, `kernels`, `capture`, `compare` and `reference` lie in the current directory and
would otherwise be importable as top-level packages (transformers asks whether `kernels` is).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from . import __path__ as kernels_path

LAYERS = ("reference", "capture", "kernels", "compare")


def own_folders() -> frozenset[str]:
    """Real paths of the folders that install as gdncheck.capture, gdncheck.kernels, ... (side by side)."""
    roots = {os.path.dirname(os.path.realpath(directory)) for directory in kernels_path}
    return frozenset(os.path.join(root, layer) for root in roots for layer in LAYERS)


class LastResortFinder:
    """Finds top-level modules in the user's directories when nothing else has them."""

    def __init__(self, directories: Sequence[str], hidden: frozenset[str]) -> None:
        self.directories = list(directories)
        self.hidden = hidden

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None:
            return None
        for directory in self.directories:
            found = PathFinder.find_spec(name, [directory])
            if found is not None and not self._is_hidden(found):
                return found
        return None

    def _is_hidden(self, found: ModuleSpec) -> bool:
        locations = list(found.submodule_search_locations or ())
        return any(os.path.realpath(location) in self.hidden for location in locations)


def use_search_path(first: Sequence[str], last: Sequence[str]) -> None:
    """Put `first` at the head of sys.path and search `last` after everything else.

    A directory of sys.path that holds our own folders (the repository's root, from PYTHONPATH) moves
    into the last group, where they are hidden.
    """
    hidden = own_folders()
    roots = {os.path.dirname(folder) for folder in hidden if os.path.basename(folder) == "kernels"}
    moved = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) in roots]
    sys.path[:] = [*first, *(entry for entry in sys.path if entry not in moved)]
    known = {os.path.realpath(entry or os.curdir) for entry in sys.path}
    directories = []
    for directory in [*moved, *last]:
        absolute = os.path.realpath(directory or os.curdir)
        if absolute not in known and absolute not in directories:
            directories.append(absolute)
    if directories:
        sys.meta_path.append(LastResortFinder(directories, hidden))
    importlib.invalidate_caches()
