"""The software and hardware that made a case: versions and device, nothing that names a person or a machine.

The idea: versions come from package metadata, so nothing is imported for it; the GPU is asked only where
torch already runs on one. No host name, no path, no user name ever enters a file that people share.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

PACKAGES = (
    "gdncheck", "torch", "triton", "transformers", "flash-linear-attention", "fla-core", "vllm", "sglang",
    "flashinfer-python", "causal-conv1d", "safetensors", "numpy", "accelerate",
)  # fmt: skip


def fingerprint() -> dict[str, Any]:
    """Plain JSON values: python, platform, packages {name: version}, gpu {name, driver, ...} or None."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: found for name in PACKAGES if (found := package_version(name)) is not None},
        "gpu": _gpu(),
    }


def package_version(name: str) -> str | None:
    """Installed version by metadata, without importing the package; None where it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gpu() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "count": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _driver() -> str | None:
    """Kernel driver's version, read from where Linux states it; None elsewhere."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)
