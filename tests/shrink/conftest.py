"""What the tests of shrink, replay and export share: small cases, and kernels run inside this process.

A process for every test would cost more than the shrinking. `Inside` runs the worker's own code on a freshly
loaded module; what a process is needed for (crashes, hangs, kills, the command) has tests with real ones.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from gdncheck.capture.make import make
from gdncheck.compare.shrink import shrink
from gdncheck.kernels.callable import CallableAdapter
from gdncheck.kernels.contract import Capabilities
from gdncheck.kernels.interface import RunResult
from gdncheck.kernels.loading import Device
from gdncheck.kernels.protocol import KernelSpec
from gdncheck.kernels.worker import run_call

FOLDER = Path(__file__).parent


def build(*lengths, **options):
    """make('qwen', ...) with two value heads of 16 x 16."""
    shape = {"k_heads": 1, "v_heads": 2, "dims": (16, 16), "state": "random", "seed": 1}
    return make(options.pop("family", "qwen"), lengths=list(lengths), **{**shape, **options})


@pytest.fixture
def small_case():
    """small_case(5, 3, ...) -> a case of two sequences."""
    return build


class Handle:
    """An open kernel without a process; an error that says crash or timeout counts as one."""

    def __init__(self, name):
        module, _, function = name.partition(":")
        self.spec = KernelSpec(name=name, module=module, attribute=function, by_import_path=True)
        self.device, self.time_limit, self.environment = "cpu", 60.0, {}
        self.name, self.processes_started = name, 1
        spec = importlib.util.spec_from_file_location(module, FOLDER / f"{module}.py")
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        self.adapter = CallableAdapter(name, getattr(loaded, function), Capabilities())
        self.info = self.adapter.describe()
        self.calls = 0

    def run(self, calls, *, time_limit=None, fresh_process=False):
        self.calls += len(calls)
        return [self._one(call) for call in calls]

    def _one(self, call):
        finished, outputs = run_call(self.adapter, call, Device("cpu", ("cpu",)))
        lost = next((s for s in ("crash", "timeout") if s in (finished.message or "")), finished.status)
        return RunResult(
            status=lost,
            outputs=dict(zip(finished.names, outputs, strict=True)),
            seconds=finished.seconds,
            message=finished.message,
            evidence=finished.evidence,
        )

    def close(self):
        pass


class Inside:
    """A pool whose workers live in this process."""

    def __init__(self, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def begin(self, kernel, **options):
        return Handle(kernel if isinstance(kernel, str) else kernel.name)

    open = begin


@pytest.fixture
def inside(monkeypatch):
    """Shrink and replay without processes."""
    for module in ("shrink.reduce", "replay"):
        monkeypatch.setattr(f"gdncheck.compare.{module}.WorkerPool", Inside)


@pytest.fixture
def shrunk(inside):
    """shrunk('leaks', case, ...) -> Shrunk, inside this process."""

    def run(name, case, **options):
        return shrink(case, f"shrinkable:{name}", **{"budget": 120.0, "device": "cpu", **options})

    return run


@pytest.fixture(scope="session")
def leak_start():
    """Four sequences, of which two are enough to show a leak."""
    return build(20, 5, 12, 17)


@pytest.fixture(scope="session")
def leak(leak_start, tmp_path_factory):
    """`leaks` shrunk once, with its file and the passing one beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gdncheck.compare.shrink.reduce.WorkerPool", Inside)
        out = tmp_path_factory.mktemp("leak") / "small.safetensors"
        return shrink(leak_start, "shrinkable:leaks", budget=300.0, device="cpu", out=out)


@pytest.fixture
def with_processes(monkeypatch):
    """The kernels can be found by workers."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    return FOLDER
