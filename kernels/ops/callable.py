"""An operation under test that is any Python callable, by import path `module:function`.

The idea: the function takes by keyword the canonical tensors that it names (`signature`), and returns the
operation's outputs: a dict by name, or, in the signature's order, a tuple, or one tensor. Besides it may name
`eps`, `heads` and `scale`; `gdncheck_capabilities` on it (or its module) declares its contract, as for a
rule's function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...capture.errors import BadInput, Refused
from ..contract import Capabilities, Contract
from ..interface import KernelCall, KernelInfo
from .conv_callable import Finish, fitted
from .signature import OpSignature, signature_of

OPTIONS = ("eps", "heads", "scale")


class OpCallable:
    """The user's function as a worker sees it."""

    def __init__(self, name: str, op: str, function: Callable[..., Any], capabilities: Capabilities) -> None:
        self.name, self.function, self.capabilities = name, function, capabilities
        self.signature: OpSignature = signature_of(op)
        self.named, self.open = _named(name, function, self.signature)
        self.evidence: dict[str, Any] = {}

    def describe(self) -> KernelInfo:
        contract = Contract(kernel=self.name, clauses=self.capabilities.clauses)
        return KernelInfo(name=self.name, capabilities=self.capabilities, contract=contract)

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """Call it with what it names. Raises Refused for an option that it does not take."""
        unknown = sorted(set(call.options.extra) - self.named)
        if unknown and not self.open:
            raise Refused(f"{self.name} takes no keyword {', '.join(unknown)}")
        tensors: dict[str, Tensor] = dict(call.tensors)
        finish: Finish = dict
        if "conv_state" in self.signature.optional and not self.open:
            tensors, finish = fitted(self.name, call.tensors, self.named)
        given: dict[str, Any] = {**tensors, **call.options.extra}
        given |= {name: getattr(call.options, name) for name in OPTIONS}
        if not self.open:
            given = {name: value for name, value in given.items() if name in self.named}
        return finish(self._outputs(self.function(**given)))

    def _outputs(self, returned: Any) -> dict[str, Tensor]:
        """By name. Raises TypeError where something is missing or no tensor."""
        wanted = self.signature.outputs
        if isinstance(returned, Tensor):
            returned = (returned,)
        if isinstance(returned, tuple | list):
            if len(returned) != len(wanted):
                raise TypeError(f"it returned {len(returned)} values, not ({', '.join(wanted)})")
            returned = dict(zip(wanted, returned, strict=True))
        if not isinstance(returned, dict):
            raise TypeError(f"it returned {type(returned).__name__}, not ({', '.join(wanted)})")
        missing = [name for name in wanted if name not in returned]
        if missing:
            raise TypeError(f"it returned no {', '.join(missing)}")
        for name, value in returned.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"it returned {name} as {type(value).__name__}, not a tensor")
        return dict(returned)


def _named(name: str, function: Callable[..., Any], signature: OpSignature) -> tuple[set[str], bool]:
    """Keywords that the function names, and whether it takes any. Raises BadInput for one that nobody has."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set(signature.inputs), False  # compiled code that does not tell
    known = {*signature.inputs, *signature.optional, *OPTIONS}
    demanded = [
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    strange = [x for x in demanded if x not in known]
    if strange:
        raise BadInput(
            f"kernel {name} demands {', '.join(strange)}; {signature.op} has {', '.join(signature.inputs)}"
            + (f", and may have {', '.join(signature.optional)}" if signature.optional else "")
        )
    return {p.name for p in parameters}, any(p.kind == p.VAR_KEYWORD for p in parameters)
