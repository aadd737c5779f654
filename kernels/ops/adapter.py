"""What every adapter of an operation around the rule does: check the call, run, check what came back.

The idea: an operation's adapter is its contract and one method, `compute`, on canonical tensors; names and
refusals are the signature's business and live here once. As with the rule's adapters, class attributes and
`contract_for` load without the kernel's package, which is imported in __init__, in a worker only.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ...capture.errors import Refused
from ..contract import Capabilities, Contract
from ..interface import KernelCall, KernelInfo
from ..layouts import dtype_name
from .signature import signature_of

# An operation has no chunks and no state of the rule; only the dtypes and devices matter.
PLAIN = Capabilities(default_chunk_size=None)


class OpAdapter:
    """One operation of one family; one instance per worker."""

    family: ClassVar[str]
    op: ClassVar[str]
    package: ClassVar[str | None] = None
    capabilities: ClassVar[Capabilities] = PLAIN
    read: ClassVar[str] = "q"
    """The input whose dtype must be one of the capabilities' input_dtypes."""

    def __init__(self, version: str | None = None) -> None:
        self.version = version
        self.evidence: dict[str, Any] = {}

    @classmethod
    def contract_for(cls, version: str | None) -> Contract:
        """The contract of this operation at a version (data only)."""
        return Contract(kernel=f"{cls.family}.{cls.op}")

    def facts(self) -> dict[str, Any]:
        """Facts beside the versions that the worker reports itself."""
        return {}

    def describe(self) -> KernelInfo:
        """Who this is."""
        name = f"{self.family}.{self.op}" + (f"@{self.version}" if self.version else "")
        return KernelInfo(
            name=name,
            version=self.version,
            capabilities=self.capabilities,
            contract=self.contract_for(self.version),
            environment=self.facts(),
        )

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """One call; canonical tensors in and out (`signature`).

        Raises Refused for what the operation cannot be given; anything else is the kernel's own error.
        """
        name = f"{self.family}.{self.op}"
        missing = [x for x in signature_of(self.op).inputs if x not in call.tensors]
        if missing:
            raise Refused(f"{name}: the call has no {', '.join(missing)}")
        if self.read in call.tensors:
            given = dtype_name(call.tensors[self.read].dtype)
            if given not in self.capabilities.input_dtypes:
                raise Refused(
                    f"{name} takes {self.read} in {', '.join(self.capabilities.input_dtypes)}, not {given}"
                )
        self.evidence = dict(self.facts())
        return self.compute(call)

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        raise AssertionError("each operation has its own")
