"""A kernel by import path run in the test's own process: what a worker does, without its start."""

from __future__ import annotations

from importlib import import_module

from gdncheck.capture.errors import Refused
from gdncheck.kernels.callable import read_capabilities
from gdncheck.kernels.interface import KernelCall, RunResult
from gdncheck.kernels.ops.callable import OpCallable


class Direct:
    """`module:function` as an open kernel of an operation (`compare.session.Runner`)."""

    def __init__(self, name, op, capabilities=None):
        module, _, attribute = name.partition(":")
        function = getattr(import_module(module), attribute)
        self.adapter = OpCallable(name, op, function, read_capabilities(capabilities, name))
        self.info = self.adapter.describe()

    def run(self, calls):
        return [self._one(call) for call in calls]

    def _one(self, call):
        own = KernelCall(tensors={n: x.clone() for n, x in call.tensors.items()}, options=call.options)
        try:
            return RunResult(status="ok", outputs=self.adapter.run(own), seconds=0.0)
        except Refused as refusal:
            return RunResult(status="refused", message=str(refusal))
