"""Doubles for decode runs: a kernel by function, stepped in this process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from gdncheck.compare.decode.drift import _Run
from gdncheck.compare.decode.stream import Profile, stream_of
from gdncheck.kernels.callable import CallableAdapter, read_capabilities
from gdncheck.kernels.interface import RunResult
from gdncheck.kernels.stepwise import run_stepwise


class Stepped:
    """A handle as a decode run sees it, without a process."""

    def __init__(self, function):
        declared = read_capabilities(getattr(function, "gdncheck_capabilities", None), "kernel")
        self.adapter = CallableAdapter("kernel", function, declared)
        self.spec = SimpleNamespace(name="kernel")

    @property
    def info(self):
        return self.adapter.describe()

    def run(self, calls):
        results = []
        for call in calls:
            own = {name: tensor.clone() for name, tensor in call.tensors.items()}
            given = type(call)(tensors=own, options=call.options)
            run = run_stepwise(self.adapter, given) if call.options.stepwise else self.adapter.run(given)
            results.append(RunResult(status="ok", outputs=run, seconds=0.0))
        return results


@pytest.fixture(scope="session")
def drift_of():
    """drift_of(function, case, steps, **profile) -> Drift."""

    def measure(function, case, steps, *, whole=False, **profile):
        run = _Run(stream_of(case, steps), whole=whole, device="cpu", seed=0)
        return run.drift(Stepped(function), Profile(**profile), asked=True)

    return measure
