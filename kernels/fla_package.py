"""One version of fla-core, imported for its kernels only, and what that version can do.

The idea: what a version takes is read from its own signatures, never from its number. Two traps are
stepped round: fla's `__init__` joins every directory called `fla` on sys.path into one package, so a
cached version would be mixed with the installed one; and it imports layers and models (transformers)
where those are installed, which a kernel does not need.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from ..capture.errors import CannotRun
from . import autotune

UNNEEDED = ("fla.layers", "fla.models")
OPS = "fla.ops.gated_delta_rule"
KERNEL_MODULES = (f"{OPS}.chunk", f"{OPS}.fused_recurrent")
# The Triton kernels and nothing in their place: FlashQLA and others from 0.5.0 on; in 0.4.2 a kernel that
# splits long sequences is on unless its own variable says no.
TRITON_ONLY = {"FLA_DISABLE_BACKEND_DISPATCH": "1", "FLA_INTRACARD_CP": "0"}
FIRST_TRITON_WITHOUT_BLOCK_POINTERS = (3, 9)
SHALLOW = ("ops", "modules")


class FlaPackage:
    """The imported package: its functions by name, and what its version can do."""

    def __init__(self, fla: ModuleType, interpreted: bool) -> None:
        self.version: str = fla.__version__
        self.interpreted = interpreted
        self.chunk_gated_delta_rule = _member(f"{OPS}.chunk", "chunk_gated_delta_rule")
        self.fused_recurrent_gated_delta_rule = _member(
            f"{OPS}.fused_recurrent", "fused_recurrent_gated_delta_rule"
        )
        forward = parameters(_member(f"{OPS}.chunk", "chunk_gated_delta_rule_fwd"))
        self.chunk_size_keyword = "chunk_size" in forward
        """Does the public function obey chunk_size; 0.4 swallows it."""
        self.fused = importlib.util.find_spec(f"{OPS}.chunk_fwd") is not None
        """Are kkt and solve one kernel at chunk size 64, and the gate kept to base 2 (0.5 and later)."""
        self.grouped_heads = self.fused
        """Does the chunk path take fewer key heads than value heads."""
        self.chunk_sizes: tuple[int, ...] = (
            (16, 32, 64) if self.chunk_size_keyword or not self.fused else (64,)
        )
        self.counts_empty = self._counts_empty_sequences()

    def stage(self, name: str) -> Any:
        """A stage function by fla's name for it. Raises CannotRun where this version has none."""
        return _member(STAGE_MODULES[name], name)

    def environment(self) -> dict[str, Any]:
        """Facts for the evidence of every call."""
        return {
            "interpreted": self.interpreted,
            **{name: os.environ.get(name, "") for name in TRITON_ONLY},
        }

    def _counts_empty_sequences(self) -> bool:
        """Whether a sequence after an empty one keeps its number in the table of chunks."""
        table = _member("fla.ops.utils.index", "prepare_chunk_indices")(torch.tensor([0, 0, 1]), 16)
        return bool(table[0, 0] == 1)


STAGE_MODULES = {
    "chunk_local_cumsum": "fla.ops.utils.cumsum",
    "chunk_scaled_dot_kkt_fwd": "fla.ops.common.chunk_scaled_dot_kkt",
    "solve_tril": "fla.ops.utils.solve_tril",
    "recompute_w_u_fwd": f"{OPS}.wy_fast",
    "chunk_gated_delta_rule_fwd_intra": f"{OPS}.chunk_fwd",
    "chunk_gated_delta_rule_fwd_h": "fla.ops.common.chunk_delta_h",
    "chunk_fwd_o": "fla.ops.common.chunk_o",
    "l2norm_fwd": f"{OPS}.chunk",
}


def parameters(function: Any) -> Iterable[str]:
    """Names of a function's parameters, through its decorators."""
    return inspect.signature(inspect.unwrap(function)).parameters.keys()


def load(version: str | None = None) -> FlaPackage:
    """Import fla from sys.path, interpreted where TRITON_INTERPRET=1 or no GPU can be used.

    version: raise CannotRun unless this version is found. Import it once per process.
    """
    os.environ.update(TRITON_ONLY)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()
    if interpreted:
        from . import interpreter

        interpreter.install()
    else:
        autotune.install()
    try:
        with _alone(), warnings.catch_warnings():
            # It warns of the missing GPU, which `environment` reports.
            warnings.filterwarnings("ignore", message="Triton is not supported")
            fla = _import_kernels()
    except ImportError as error:
        raise CannotRun(
            f"fla cannot be imported ({error}); pip install fla-core, or name a cached version"
        ) from error
    if version is not None and fla.__version__ != version:
        raise CannotRun(f"fla-core {version} was asked for but sys.path leads to {fla.__version__}")
    _check_block_pointers(fla.__version__)
    return FlaPackage(fla, interpreted)


def _check_block_pointers(version: str) -> None:
    """Raise CannotRun where this fla uses what this Triton has no more."""
    import triton

    numbers = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:2])
    source = inspect.getsource(sys.modules[STAGE_MODULES["chunk_fwd_o"]])
    if numbers >= FIRST_TRITON_WITHOUT_BLOCK_POINTERS and "make_block_ptr" in source:
        raise CannotRun(
            f"fla-core {version} uses block pointers, which triton {triton.__version__} no longer has; "
            "use fla-core 0.6 or triton < 3.9"
        )


def _import_kernels() -> ModuleType:
    """Import fla and the kernels' own modules, without those of sixty other attentions where that works."""
    fla = importlib.import_module("fla")
    for name in SHALLOW:
        # A package whose __init__, which imports everything, is not run; its modules are found as ever.
        package = ModuleType(f"fla.{name}")
        package.__path__ = [os.path.join(directory, name) for directory in fla.__path__]
        sys.modules[package.__name__] = package
        setattr(fla, name, package)
    try:
        for module in KERNEL_MODULES:
            importlib.import_module(module)
    except ImportError:
        # This version's modules take something from the packages themselves: import it all.
        for name in [name for name in sys.modules if name.startswith("fla.") and name not in UNNEEDED]:
            del sys.modules[name]
        for name in SHALLOW:
            delattr(fla, name)
        for module in KERNEL_MODULES:
            importlib.import_module(module)
    return fla


@contextmanager
def _alone() -> Iterator[None]:
    """While it is imported, fla is the first directory of that name only, and has no layers or models."""
    stock = pkgutil.extend_path
    blocked = [name for name in UNNEEDED if name not in sys.modules]
    pkgutil.extend_path = lambda path, name: path
    sys.modules.update(dict.fromkeys(blocked))  # type: ignore[arg-type]
    try:
        yield
    finally:
        pkgutil.extend_path = stock
        for name in blocked:
            sys.modules.pop(name, None)


def _member(module: str, name: str) -> Any:
    """An attribute of a module of fla. Raises CannotRun where the version has no such thing."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CannotRun(f"this version of fla has no {module}.{name} ({error})") from error
