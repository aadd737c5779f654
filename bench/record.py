"""How a benchmark writes down what it measured: one JSON file with date, versions, medians, spread.

Benchmarks compare inside one run and quote ratios of medians; a single absolute time says little on a
shared machine. Results lie in bench/results/ beside the name of the script that made them.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "triton", "numpy", "fla-core", "transformers", "gdncheck")


def versions() -> dict[str, str]:
    """Installed versions of what a result depends on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """Processor and GPU, without any name of the host."""
    import torch

    cores = len(os.sched_getaffinity(0))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"arch": platform.machine(), "cores": cores, "torch_threads": torch.get_num_threads(), "gpu": gpu}


def timed(run: Callable[[], Any], repeats: int, *, warmup: int = 1) -> list[float]:
    """Seconds of each of `repeats` runs after `warmup` uncounted ones; synchronises a GPU."""
    import torch

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    seconds = []
    for number in range(warmup + repeats):
        wait()
        started = time.perf_counter()
        run()
        wait()
        if number >= warmup:
            seconds.append(time.perf_counter() - started)
    return seconds


def spread(seconds: list[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    return {"min": min(seconds), "median": statistics.median(seconds), "max": max(seconds)}


def save(name: str, script: str, numbers: dict[str, Any]) -> Path:
    """Write bench/results/NAME.json and print where it is."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    document = {
        "date": datetime.date.today().isoformat(),
        "script": Path(script).name,
        "versions": versions(),
        "machine": machine(),
        **numbers,
    }
    path.write_text(json.dumps(plain(document), indent=2, allow_nan=False) + "\n")
    print(f"wrote bench/results/{path.name}")
    return path


def plain(value: Any) -> Any:
    """The same with non-finite numbers as words, which JSON has no numbers for."""
    if isinstance(value, dict):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
