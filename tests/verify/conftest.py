"""Doubles for verify steps: a kernel by function, run in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from gdncheck.compare.session import Settings, diff_one
from gdncheck.compare.soundness import soundness_of
from gdncheck.compare.witness import Witness
from gdncheck.kernels.callable import CallableAdapter, read_capabilities
from gdncheck.kernels.interface import RunResult

# The planted kernels are also found by name, in workers.
FOLDER = str(Path(__file__).parent)
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)


class InProcess:
    """A runner as `session` sees it, without a process."""

    def __init__(self, function):
        declared = read_capabilities(function.gdncheck_capabilities, "kernel")
        self.adapter = CallableAdapter("kernel", function, declared)

    @property
    def info(self):
        return self.adapter.describe()

    def run(self, calls):
        results = []
        for call in calls:
            own = {name: tensor.clone() for name, tensor in call.tensors.items()}
            outputs = self.adapter.run(type(call)(tensors=own, options=call.options))
            results.append(RunResult(status="ok", outputs=outputs, seconds=0.0))
        return results


@pytest.fixture(scope="session")
def in_process():
    return InProcess


@pytest.fixture(scope="session")
def verdict_on():
    """verdict_on(function, case) -> DiffResult."""

    def judge(function, case):
        witness = Witness(case)
        return diff_one(InProcess(function), witness, soundness_of(witness), Settings())

    return judge
