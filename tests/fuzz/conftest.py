"""What the fuzzer's tests share: a pool whose workers live in this process, and runs of a few seconds.

Starting a process costs more than a short run, so most tests replace the pool by `Inside`: the worker's own
code on a freshly loaded kernel module. What kills processes is tested with processes.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
from gdncheck.compare.fuzz.fuzz import fuzz
from gdncheck.kernels import allocation
from gdncheck.kernels.callable import CallableAdapter, read_capabilities
from gdncheck.kernels.emulation import EmulationChunk
from gdncheck.kernels.interface import RunResult
from gdncheck.kernels.loading import Device
from gdncheck.kernels.worker import run_call

FOLDER = Path(__file__).parent
SHAPE = "1x2x16x16:bf16"


class Handle:
    """An open kernel without a process; its module is its own."""

    def __init__(self, name):
        self.spec, self.device, self.time_limit = SimpleNamespace(name=name), "cpu", 60.0
        self.adapter = EmulationChunk() if name == "emulation.chunk" else _loaded(name)
        self.info = self.adapter.describe()
        self.processes_started = 1
        self.calls = 0

    def run(self, calls, *, time_limit=None, fresh_process=False):
        self.calls += len(calls)
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
        pass


@pytest.fixture
def handle_of():
    """handle_of(kernel): an open kernel without a process."""
    return Handle


def _loaded(name):
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
def pool_inside():
    """The pool without processes, for a run that a test starts by itself."""
    return Inside


@pytest.fixture
def inside(monkeypatch):
    """Runs of this test have no processes."""
    monkeypatch.setattr("gdncheck.compare.fuzz.sitting.WorkerPool", Inside)
    monkeypatch.setattr("gdncheck.compare.fuzz.findings.shrink", _no_shrink)


def _no_shrink(*args, **options):
    from gdncheck.capture.errors import CannotRun

    raise CannotRun("this test shrinks nothing")


@pytest.fixture
def fuzz_of(inside):
    """fuzz_of('kernel of fuzz_kernels', cases=...) -> FuzzReport, without processes."""

    def run(name, **options):
        kernels = [n if "." in n else f"fuzz_kernels:{n}" for n in name.split(",")]
        given = {"shapes": [SHAPE], "max_tokens": 130, "device": "cpu", "cases": 60}
        return fuzz(kernels=kernels, **{**given, **options})

    return run
