"""What an operation under judgement is: a value that its own file fills in, and that the judge walks.

The idea: everything special about gate, l2norm, norm or conv is data or a pure function on canonical tensors:
the float64 truth, the same operation with rounding at cast points, which clauses change the function, where
the input leaves the domain, where nothing rounds, and what a wrong kernel of this kind usually is. Judging,
chaining and printing know no operation by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.contract import Contract
from ...kernels.ops.signature import OpSignature, signature_of
from ...reference.emulation_ops import OpRounding
from ..verdict import Outcome

Tensors = dict[str, Tensor]
Heads = tuple[int, int, int, int]


@dataclass(frozen=True)
class OpInputs:
    """The inputs of one operation, on the device of the verdict."""

    tensors: Tensors
    """Canonical, by the names of the operation's signature."""
    function: Any
    """What is computed (`reference.op_functions`): the pure function, with the case's own eps."""
    cu_seqlens: Tensor
    """[N+1] int64; one sequence where the operation has none of its own."""
    heads: Heads | None = None
    """(HK, K, HV, V) where the case says so."""

    def changed(self, **tensors: Tensor) -> OpInputs:
        """The same with some tensors replaced."""
        return replace(self, tensors={**self.tensors, **tensors})

    def computing(self, **parameters: Any) -> OpInputs:
        """The same with another function."""
        return replace(self, function=replace(self.function, **parameters))


@dataclass(frozen=True)
class OpFinding:
    """Where an input leaves the domain."""

    tensor: str
    row: int
    """Packed token."""
    text: str
    """Tensor, value, consequence."""


@dataclass(frozen=True)
class Guess:
    """A function that a departing kernel may compute instead."""

    text: str
    """Follows `it looks as if`."""
    change: Callable[[OpInputs], OpInputs]
    excusable: bool = False
    """A sound kernel may compute this and have forgotten to declare it: `suspect`, not `fail`."""


def no_findings(inputs: OpInputs, casts: Mapping[str, str]) -> list[OpFinding]:
    """The whole range is inside the domain."""
    return []


def never_exact(inputs: OpInputs) -> Tensors:
    """No entry is known to be exact."""
    return {}


def everything(inputs: OpInputs, outputs: Tensors) -> tuple[OpInputs, Tensors]:
    """Every row is judged."""
    return inputs, outputs


@dataclass(frozen=True)
class Op:
    """One operation."""

    name: str
    truth: Callable[[OpInputs], Tensors]
    """Float64 outputs."""
    emulate: Callable[[OpInputs, OpRounding], Tensors]
    """The outputs as float32 arithmetic has them, rounded where the casts say."""
    reads: str
    """The input whose dtype the casts call native, and that the outputs have too unless `wide` says not."""
    function: Any
    """The pure function."""
    weight: str | None = None
    """The input whose dtype a cast `promoted` takes where it is wider."""
    wide: tuple[str, ...] = ()
    """Outputs that are float32 whatever the input."""
    copies: tuple[str, ...] = ()
    """Outputs that hold input values and nothing else: exact in any dtype that holds them."""
    profiles: tuple[Mapping[str, str], ...] = ({},)
    """Cast tables of sound kernels: what one that declares no rounding may do."""
    forms: Mapping[str, Callable[[OpInputs], OpInputs]] = field(default_factory=dict)
    """Ways to compute the same function, by the word that the clause `form` gives for one."""
    form: str | None = None
    """Clause that says which form a kernel has; none declared: any may be it."""
    clauses: Mapping[str, Callable[[OpInputs, Any], OpInputs]] = field(default_factory=dict)
    """Transform clause -> what it does to inputs or function."""
    domain: Callable[[OpInputs, Mapping[str, str]], Sequence[OpFinding]] = no_findings
    exact: Callable[[OpInputs], Tensors] = never_exact
    """Output -> bool mask [R, H, ...] of entries where no sound kernel rounds anything."""
    guesses: tuple[Guess, ...] = ()
    points: str | None = None
    """First word of its cast points; None: its name."""
    checks: tuple[Callable[[Any], Outcome], ...] = ()
    """Checks of an OpTrial of its own, after the common ones."""
    owned: Callable[[OpInputs, Tensors], tuple[OpInputs, Tensors]] = everything
    """Inputs and outputs without the rows that nobody reads."""
    beside: Callable[[OpInputs, Mapping[str, Tensor], Mapping[str, Any]], Outcome] | None = None
    """A check of the whole answer (inputs, outputs, evidence), with what is returned besides."""
    further: Callable[..., list[Outcome]] | None = None
    """Calls of its own beside the case's: (runner, op, inputs, seed) -> outcomes."""

    @property
    def signature(self) -> OpSignature:
        return signature_of(self.name)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that are judged."""
        return self.signature.outputs

    def transforms(self, contract: Contract, inputs: OpInputs) -> tuple[Any, ...]:
        """The declared clauses that change the function on these inputs."""
        found = [c for c in contract.clauses if c.kind == "transform" and c.id in self.clauses]
        return tuple(c for c in found if _differs(self.clauses[c.id](inputs, c.value), inputs))

    def under(self, inputs: OpInputs, clauses: Sequence[Any]) -> OpInputs:
        """The inputs as the clauses would have the truth see them."""
        for clause in clauses:
            inputs = self.clauses[clause.id](inputs, clause.value)
        return inputs


def _differs(a: OpInputs, b: OpInputs) -> bool:
    same = all(a.tensors[name] is b.tensors[name] for name in b.tensors)
    return a.function != b.function or not same


def parameter(name: str) -> Callable[[OpInputs, Any], OpInputs]:
    """A clause that sets one parameter of the function."""
    return lambda inputs, value: inputs.computing(**{name: value})


def first_bad_row(tensor: Tensor) -> int | None:
    """First row of [T, ...] with a NaN or an infinity."""
    bad = (~torch.isfinite(tensor)).flatten(1).any(-1) if tensor.ndim > 1 else ~torch.isfinite(tensor)
    where = bad.nonzero()
    return int(where[0]) if len(where) else None


def not_finite(inputs: OpInputs, names: Sequence[str], *, infinite: bool = False) -> list[OpFinding]:
    """Tensors that hold a NaN (infinite: infinities are inside the domain), each with its first row."""
    found = []
    for name in names:
        tensor = inputs.tensors.get(name)
        if tensor is None:
            continue
        looked_at = (
            torch.nan_to_num(tensor.double(), nan=torch.nan, posinf=0, neginf=0) if infinite else tensor
        )
        row = first_bad_row(looked_at)
        if row is not None:
            value = tensor[row].flatten() if tensor.ndim > 1 else tensor[row : row + 1]
            worst = float(value[~torch.isfinite(value)][0])
            found.append(OpFinding(name, row, f"{name} holds {worst}"))
    return found
