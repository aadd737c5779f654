"""How a worker gets its kernel: the device, the paths, the interpreter's switch, and only then the package.

The idea: order is everything. Triton reads TRITON_INTERPRET when it is imported, fla chooses its device
when it is imported, and a package binds torch's functions by name when it is imported; so what must be
in force is put in force first, and the package comes last.

Leaves to others: serving calls (`worker`), the shims themselves (`interpreter`).
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..capture.errors import BadInput, CannotRun
from . import allocation, autotune
from .interface import Adapter, KernelInfo
from .protocol import KernelSpec, Open, copy_bytes
from .searchpath import use_search_path

REPORTED_PACKAGES = (
    "torch", "triton", "numpy", "fla-core", "transformers", "vllm", "sglang", "flashinfer-python",
)  # fmt: skip


class Device:
    """Where a worker's kernel runs."""

    def __init__(self, wanted: str, supported: tuple[str, ...]) -> None:
        """Choose a device. Raises CannotRun where a GPU is asked for and none can be used."""
        available = torch.cuda.is_available()
        if wanted == "cuda" and not available:
            build = f"torch {torch.__version__} " + (
                f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a CPU build"
            )
            raise CannotRun(
                f"no CUDA device can be used here ({build}); use --device cpu, see gdncheck doctor"
            )
        if wanted in ("cpu", "cuda") and wanted not in supported:
            raise CannotRun(f"it does not run on {wanted}, only on {', '.join(supported)}")
        if wanted == "auto":
            wanted = "cuda" if available and "cuda" in supported else "cpu"
            if wanted not in supported:
                raise CannotRun("it needs a CUDA device and none can be used here; see gdncheck doctor")
        self.name = wanted

    @property
    def is_cuda(self) -> bool:
        return self.name == "cuda"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def own(self, tensor: Tensor) -> Tensor:
        """A copy that belongs to the kernel, in an allocation of its own."""
        if self.is_cuda:
            return tensor.to(self.name)
        own = torch.empty(tensor.shape, dtype=tensor.dtype)
        copy_bytes(own, tensor)
        return own

    def is_lost(self) -> bool:
        """Has the CUDA context taken an error that every later call would report again?"""
        try:
            self.synchronize()
        except RuntimeError:
            return True
        return False


def load(request: Open) -> tuple[Adapter, KernelInfo, Device]:
    """Load the kernel that is asked for. Raises GdncheckError, or whatever its package raises."""
    spec = request.kernel
    use_search_path(spec.sys_path, request.search_path)
    os.environ.update(spec.environment)
    allocation.install()
    if spec.by_import_path:
        device = Device(request.device, ("cpu", "cuda"))
        interpret_without_gpu(device)
        from .callable import load_callable

        adapter: Adapter = load_callable(spec)
        mend_triton_users()
    else:
        factory = _adapter_class(spec)
        os.environ.update(getattr(factory, "environment", {}))
        device = Device(request.device, factory.capabilities.devices)
        interpret_without_gpu(device)
        adapter = factory(version=spec.version)
    info = adapter.describe()
    environment = {**_environment(device), **info.environment}
    # Two working trees of one package differ in where they lie only, which an adapter is not told.
    name = spec.name if "@path:" in spec.name or "@git:" in spec.name else info.name
    return adapter, msgspec.structs.replace(info, name=name, environment=environment), device


def _adapter_class(spec: KernelSpec) -> Any:
    kernels = import_module(spec.module).KERNELS
    if spec.attribute not in kernels:
        family = spec.name.partition(".")[0]
        known = ", ".join(f"{family}.{op}" for op in sorted(kernels))
        raise BadInput(f"unknown kernel {spec.name}; {family} has {known}")
    return kernels[spec.attribute]


def interpret_without_gpu(device: Device) -> None:
    """Without a GPU, Triton kernels run in its interpreter, mended as soon as something imports triton.

    With one its tuners are watched from there on, also where a kernel imports triton in its first call.
    """
    if device.is_cuda:
        sys.meta_path.insert(0, TritonImport(autotune.install))
        return
    os.environ["TRITON_INTERPRET"] = "1"
    sys.meta_path.insert(0, TritonImport(_mend_interpreter))


def _mend_interpreter() -> None:
    from .interpreter import install

    install()


class TritonImport(MetaPathFinder, Loader):
    """Lets triton be imported as usual and does something right after, before any kernel exists.

    A kernel that needs no triton does not pay for importing it.
    """

    def __init__(self, after: Callable[[], object]) -> None:
        self.after = after
        self.loader: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "triton":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Triton and the tools that look for its files see the loader they know.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        sys.meta_path.remove(self)
        self.loader.exec_module(module)
        self.after()


def mend_triton_users() -> None:
    """Mend what loaded modules bound of Triton at import; nothing where it is not interpreted."""
    triton = sys.modules.get("triton")
    if triton is None:
        return
    from .interpreter import after_import

    language = sys.modules.get("triton.language")
    users = [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        and name.partition(".")[0] not in ("triton", "torch", "gdncheck")
        and any(value is triton or value is language for value in list(vars(module).values()))
    ]
    after_import(users)


def _environment(device: Device) -> dict[str, Any]:
    found: dict[str, Any] = {"python": sys.version.split()[0], "device": device.name}
    for package in REPORTED_PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    # An adapter that knows better (a torch function whose package merely imports triton) says so itself.
    found["interpreted"] = os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules
    if device.is_cuda:
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    return found
