"""Kernels of operations called in this process: what a worker would do, without its start."""

from __future__ import annotations

from importlib import import_module

import msgspec
import torch
from gdncheck.compare.ops.chain import ChainTrial, Link, examine
from gdncheck.compare.ops.chain_verdict import chain_ruling
from gdncheck.kernels import planted_ops
from gdncheck.kernels.contract import Capabilities
from gdncheck.kernels.interface import KernelCall, KernelInfo, RunResult
from gdncheck.kernels.ops.callable import OpCallable
from gdncheck.kernels.registry import resolve

ORDER = ("conv", "split", "l2norm", "gate", "rule", "norm")


class Direct:
    """A runner (`compare.session.Runner`) over an adapter in this process."""

    def __init__(self, adapter) -> None:
        self.adapter = adapter
        self.info: KernelInfo = adapter.describe()

    def run(self, calls: list[KernelCall]) -> list[RunResult]:
        found = []
        for call in calls:
            own = {name: tensor.clone() for name, tensor in call.tensors.items()}
            with torch.no_grad():
                outputs = self.adapter.run(KernelCall(tensors=own, options=call.options))
            found.append(RunResult(status="ok", outputs=outputs))
        return found


class DirectRule(Direct):
    """The emulated rule in one declared precision: a third of the yardstick of an undeclared one."""

    PROFILE = "fla-0.4"

    def __init__(self, adapter) -> None:
        super().__init__(adapter)
        capabilities = msgspec.structs.replace(self.info.capabilities, profile=self.PROFILE)
        self.info = msgspec.structs.replace(self.info, capabilities=capabilities)

    def run(self, calls: list[KernelCall]) -> list[RunResult]:
        extra = {"profile": self.PROFILE}
        return super().run(
            [
                KernelCall(tensors=c.tensors, options=msgspec.structs.replace(c.options, extra=extra))
                for c in calls
            ]
        )


def emulated(op: str) -> Direct:
    """The honest emulation of an operation, or of the rule's chunk form."""
    spec = resolve("emulation.chunk" if op == "rule" else f"emulation.{op}")
    kind = DirectRule if op == "rule" else Direct
    return kind(import_module(spec.module).KERNELS[spec.attribute](version=None))


def function(op: str, f) -> Direct:
    """A function as a kernel by import path."""
    return Direct(OpCallable(f"{f.__module__}:{f.__name__}", op, f, Capabilities()))


def planted(name: str) -> tuple[str, Direct]:
    """A fault of `planted_ops` and the operation that it sits in."""
    op = planted_ops.FAULTS[name].op
    return op, function(op, getattr(planted_ops, name))


def run_chain(case, *, seed: int = 0, **replaced: Direct):
    """(ruling, findings) of the emulated chain with some operations replaced."""
    runners = {op: replaced.get(op) or emulated(op) for op in ORDER}
    links = [Link(op, r.info.name, r.info, r) for op, r in runners.items()]
    trial = ChainTrial(case, links, device="cpu", seed=seed)
    findings, errors = examine(trial, trial.run())
    return chain_ruling(trial, findings, errors), findings
