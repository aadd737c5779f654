"""A child that says what this machine has: `PYTHON -m gdncheck.kernels.probe`, one JSON line on stdout.

The idea: finding out means importing torch and triton and waking the driver, any of which may hang, print
or kill the process, so it is done in a process that may. Every fact that cannot be had is the error's own
line instead.

Leaves to others: what the facts mean (`doctor`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

PACKAGES = (
    "torch", "triton", "numpy", "einops", "safetensors", "msgspec", "fla-core", "flash-linear-attention",
    "transformers", "accelerate", "causal-conv1d", "flash-qla", "tilelang", "vllm", "sglang",
    "flashinfer-python", "apache-tvm-ffi",
)  # fmt: skip


def packages() -> dict[str, str]:
    """Installed versions, read without importing anything."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def gpus() -> dict[str, Any]:
    """What torch makes of the GPUs, and the newest CUDA that the driver speaks."""
    import torch

    found: dict[str, Any] = {"torch_cuda": torch.version.cuda, "available": torch.cuda.is_available()}
    found["devices"] = []
    for index in range(torch.cuda.device_count() if found["available"] else 0):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        found["devices"].append(
            {"name": properties.name, "capability": capability, "bytes": properties.total_memory}
        )
    read_driver = getattr(torch._C, "_cuda_getDriverVersion", None)
    if found["available"] and read_driver is not None:
        number = read_driver()  # 12080 is CUDA 12.8
        found["driver_cuda"] = f"{number // 1000}.{number % 1000 // 10}"
    return found


def driver() -> str | None:
    """The driver's version as nvidia-smi tells it; None without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except FileNotFoundError:
        return None
    return answer.strip().partition("\n")[0] or None


def ptxas() -> dict[str, str]:
    """The assembler that Triton calls, and its release."""
    path = os.environ.get("TRITON_PTXAS_PATH")
    if not path:
        spec = importlib.util.find_spec("triton")  # importing it would fix whether it interprets
        if spec is None or spec.origin is None:
            raise FileNotFoundError("triton is not installed")
        path = os.path.join(os.path.dirname(spec.origin), "backends", "nvidia", "bin", "ptxas")
    answer = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=20, check=True
    ).stdout
    release = answer.rpartition("release ")[2].partition(",")[0].strip()
    return {"path": path, "version": release}


def interpreter() -> dict[str, Any]:
    """Is Triton's interpreter, with our shims, in working order."""
    from .interpreter import install

    return install()


FACTS: dict[str, Callable[[], Any]] = {
    "packages": packages, "gpus": gpus, "driver": driver, "ptxas": ptxas, "interpreter": interpreter,
}  # fmt: skip


def main() -> None:
    """Print the facts; whatever imports print goes to stderr."""
    answer = os.dup(1)
    os.dup2(2, 1)
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": f"{platform.system()} {platform.machine()}",
        "errors": {},
    }
    for name, find in FACTS.items():
        try:
            facts[name] = find()
        except Exception as error:
            facts[name] = None
            facts["errors"][name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    os.write(answer, json.dumps(facts, default=str).encode() + b"\n")


if __name__ == "__main__":
    main()
