"""What flows through a layer's core: the values by name, and what each operation reads and gives.

The idea: a chain is walked three times in the same way (by kernels, in float64, by honest emulations), so the
walk is one function and only the step differs. Between l2norm and the rule q and k change their meaning; each
operation keeps its own inputs, so nothing is lost by one name for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ...capture.case import Case
from ...kernels.ops.signature import signature_of
from .op import Tensors

Step = Callable[[str, Tensors], Tensors | None]
"""(operation, its inputs) -> its outputs, or None where the walk ends."""
RENAMED = {"output": "core_output"}


def reads(op: str) -> tuple[str, ...]:
    """Values that an operation takes from the chain or the case."""
    signature = signature_of("chunk" if op == "rule" else op)
    return (*signature.inputs, *signature.optional)


def gives(op: str) -> tuple[str, ...]:
    return signature_of("chunk" if op == "rule" else op).outputs


def given_by(case: Case, device: torch.device | str) -> Tensors:
    """What the case hands to the core: everything but what the core computes itself."""
    computed = {"q", "k", "v", "g", "beta", "conv_output", "core_output"}
    return {
        name: tensor.to(device)
        for name, tensor in case.tensors.items()
        if name not in computed and not name.startswith("observed_")
    }


class Walk:
    """One way through a chain: per operation what it read and what it gave."""

    def __init__(self) -> None:
        self.read: dict[str, Tensors] = {}
        self.gave: dict[str, Tensors] = {}

    def values(self, op: str) -> Mapping[str, Tensor]:
        return self.gave[op]


def walk(ops: Sequence[str], given: Mapping[str, Tensor], step: Step) -> Walk:
    """Walk a chain. step: makes one operation's outputs of its inputs."""
    values: Tensors = dict(given)
    found = Walk()
    for op in ops:
        inputs = {name: values[name] for name in reads(op) if name in values}
        outputs = step(op, inputs)
        found.read[op] = inputs
        if outputs is None:
            break
        found.gave[op] = outputs
        for name, tensor in outputs.items():
            values[RENAMED.get(name, name)] = tensor
    return found


def shown(ops: Sequence[str], given: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Walk:
    """The walk of a core that is one call and shows values on its way."""
    return walk(ops, given, lambda op, _: {n: outputs[n] for n in gives(op)})
