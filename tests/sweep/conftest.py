"""What the sweep's tests share: small cases, the planted kernels, and workers that are no processes.

Starting a process costs more than a small sweep, so most tests replace the pool by `Inside`: the worker's own
code on a freshly loaded kernel module, which is all of a process that a planted kernel can see. The slow
tests, and those of the store and the command, use processes.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
from gdncheck.capture.make import make
from gdncheck.compare.sweep.sweep import sweep
from gdncheck.kernels import allocation
from gdncheck.kernels.callable import CallableAdapter, read_capabilities
from gdncheck.kernels.emulation import EmulationChunk
from gdncheck.kernels.interface import RunResult
from gdncheck.kernels.loading import Device
from gdncheck.kernels.worker import run_call

FOLDER = Path(__file__).parent


@pytest.fixture
def small_case():
    """make('qwen', ...) at 7 tokens and two heads of 16 x 16."""

    def build(**options):
        shape = {"lengths": [7], "k_heads": 1, "v_heads": 2, "dims": (16, 16), "state": "random", "seed": 1}
        return make(options.pop("family", "qwen"), **{**shape, **options})

    return build


class Handle:
    """An open kernel without a process; its module is its own."""

    def __init__(self, name):
        self.spec, self.device, self.time_limit = SimpleNamespace(name=name), "cpu", 60.0
        self.adapter = EmulationChunk() if name == "emulation.chunk" else _planted(name)
        self.info = self.adapter.describe()

    def run(self, calls):
        return [self._one(call) for call in calls]

    def _one(self, call):
        finished, outputs = run_call(self.adapter, call, Device("cpu", ("cpu",)))
        return RunResult(
            status=finished.status,
            outputs=dict(zip(finished.names, outputs, strict=True)),
            seconds=finished.seconds,
            message=finished.message,
            evidence=finished.evidence,
        )

    def close(self):
        self.adapter = None


def _planted(name):
    module, _, function = name.partition(":")
    spec = importlib.util.spec_from_file_location(module, FOLDER / f"{module}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    kernel = getattr(loaded, function)
    return CallableAdapter(name, kernel, read_capabilities(kernel.gdncheck_capabilities, name))


class Inside:
    """A pool whose workers live in this process."""

    def __init__(self, **options):
        pass

    def __enter__(self):
        allocation.install()
        return self

    def __exit__(self, *error):
        allocation.uninstall()

    def begin(self, kernel, **options):
        return Handle(kernel if isinstance(kernel, str) else kernel.name)


@pytest.fixture
def processes(monkeypatch, small_case):
    """processes('planted kernel', case options, only=...) -> SweepReport, by real workers."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def run(name, case=None, **options):
        kernel = name if "." in name or ":" in name else f"planted:{name}"
        return sweep(small_case(**(case or {})), kernels=[kernel], device="cpu", **options)

    return run


@pytest.fixture
def sweep_of(monkeypatch, processes):
    """As `processes`, without processes."""
    monkeypatch.setattr("gdncheck.compare.sweep.sweep.WorkerPool", Inside)
    return processes
