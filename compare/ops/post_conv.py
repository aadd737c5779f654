"""post-conv: split, l2norm and gate in one kernel, as vLLM's prefill runs them from 0.20 on.

Its truth and its honest errors are those of the three operations, one after the other; so are its clauses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...kernels.ops.emulation import split
from ...reference.emulation_ops import OpRounding
from ...reference.op_functions import Gate, L2Norm
from . import gate, l2norm
from .op import Guess, Op, OpFinding, OpInputs, Tensors

PURE_L2NORM, PURE_GATE = L2Norm(), Gate()


@dataclass(frozen=True)
class PostConv:
    """The functions of the two parts that compute something."""

    l2norm: L2Norm = PURE_L2NORM
    gate: Gate = PURE_GATE


def _parts(inputs: OpInputs) -> tuple[OpInputs, OpInputs, Tensors]:
    """Inputs of l2norm and gate, and the split."""
    heads = split(inputs.tensors["conv_output"], inputs.heads)
    norm = replace(inputs, tensors={n: heads[n] for n in ("q", "k")}, function=inputs.function.l2norm)
    gated = {n: inputs.tensors[n] for n in ("a", "b", "A_log", "dt_bias")}
    return norm, replace(inputs, tensors=gated, function=inputs.function.gate), heads


def truth(inputs: OpInputs) -> Tensors:
    norm, gated, heads = _parts(inputs)
    return {**l2norm.truth(norm), "v": heads["v"].double(), **gate.truth(gated)}


def emulate(inputs: OpInputs, at: OpRounding) -> Tensors:
    norm, gated, heads = _parts(inputs)
    return {**l2norm.emulate(norm, at), "v": heads["v"].float(), **gate.emulate(gated, at)}


def domain(inputs: OpInputs, casts: Mapping[str, str]) -> list[OpFinding]:
    norm, gated, _ = _parts(inputs)
    return [*l2norm.domain(norm, casts), *gate.domain(gated, casts)]


def exact(inputs: OpInputs) -> Tensors:
    norm, gated, _ = _parts(inputs)
    return {**l2norm.exact(norm), **gate.exact(gated)}


def _set(part: str, name: str) -> Any:
    def change(inputs: OpInputs, value: Any) -> OpInputs:
        return inputs.computing(**{part: replace(getattr(inputs.function, part), **{name: value})})

    return change


def _form(log1p: bool) -> Callable[[OpInputs], OpInputs]:
    return lambda inputs: _set("gate", "log1p")(inputs, log1p)


def _gate_guess(guess: Guess) -> Guess:
    """A guess of the gate on the gate's part."""

    def change(inputs: OpInputs) -> OpInputs:
        _, gated, _ = _parts(inputs)
        changed = guess.change(gated)
        return replace(
            inputs,
            tensors={**inputs.tensors, **changed.tensors},
            function=replace(inputs.function, gate=changed.function),
        )

    return replace(guess, change=change)


def _l2norm_guess(guess: Guess) -> Guess:
    def change(inputs: OpInputs) -> OpInputs:
        norm, _, _ = _parts(inputs)
        return inputs.computing(l2norm=guess.change(norm).function)

    return replace(guess, change=change)


OP = Op(
    name="post-conv",
    truth=truth,
    emulate=emulate,
    reads="conv_output",
    function=PostConv(),
    wide=("g",),
    copies=("v",),
    form="gate.form",
    forms={"log1p": _form(True), "log": _form(False)},
    clauses={
        "gate.softplus-threshold": _set("gate", "threshold"),
        "l2norm.eps": _set("l2norm", "eps"),
    },
    domain=domain,
    exact=exact,
    guesses=(
        *(_gate_guess(g) for g in gate.GUESSES),
        *(_l2norm_guess(g) for g in l2norm.GUESSES if "swapped" not in g.text),
    ),
)
