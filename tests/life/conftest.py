"""What the tests of histories share: one thread, the reference on small heads, and short runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from gdncheck.compare.life.life import make_bookkeeper
from gdncheck.compare.life.machine import Reference
from gdncheck.compare.life.run import run_history
from gdncheck.compare.life.tokens import Sizes
from gdncheck.kernels.callable import CallableAdapter, read_capabilities
from gdncheck.kernels.interface import RunResult
from gdncheck.kernels.loading import Device
from gdncheck.kernels.worker import run_call

FOLDER = Path(__file__).parent


class Handle:
    """An open kernel of pool_kernels.py, without a process."""

    def __init__(self, name):
        spec = importlib.util.spec_from_file_location("pool_kernels", FOLDER / "pool_kernels.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name.partition(":")[2])
        self.adapter = CallableAdapter(name, kernel, read_capabilities(kernel.gdncheck_capabilities, name))
        self.info = self.adapter.describe()

    def run(self, calls):
        found = []
        for call in calls:
            finished, outputs = run_call(self.adapter, call, Device("cpu", ("cpu",)))
            named = dict(zip(finished.names, outputs, strict=True))
            found.append(RunResult(status=finished.status, outputs=named, message=finished.message))
        return found


class Inside:
    """A pool whose workers live in this process: starting one takes longer than a short history."""

    def __init__(self, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def open(self, name):
        return Handle(name)


@pytest.fixture
def inside(monkeypatch):
    """life() runs kernels of pool_kernels.py in this process."""
    monkeypatch.setattr("gdncheck.compare.life.life.WorkerPool", Inside)


@pytest.fixture(scope="session")
def reference():
    return Reference(Sizes(k_heads=1, v_heads=2, key_dim=8, value_dim=8))


@pytest.fixture
def told(reference):
    """told(history, 'planted:x') -> Told, by the reference."""

    def run(history, bookkeeper="sound", **options):
        maker = make_bookkeeper(bookkeeper) if isinstance(bookkeeper, str) else bookkeeper
        return run_history(history, reference, maker, **{"most_runs": 2, **options})

    return run
