"""gate: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b).

Contract clauses with numbers: `gate.softplus-threshold` (20 in torch, fla and vLLM: from there softplus(x)
is x, which changes g by 2e-9 relative at most), `beta.dtype` (bfloat16 where the layer keeps the model's
dtype), `cast.gate.sigmoid` (each step of the sigmoid in bf16, vLLM on a CPU), `gate.form` (log: log(1 +
exp(x)), which loses small values), `gate.dt-bias` (bfloat16: dt_bias is rounded first, vLLM on a CPU).
Domain: all of a and b but NaN; a = -inf is g = 0 and a = +inf a reset (g = -inf), b = -inf and +inf are beta
0 and 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...reference.emulation_ops import OpRounding, emulate_gate
from ...reference.gate import gate as true_gate
from ...reference.op_functions import Gate
from .op import Guess, Op, OpFinding, OpInputs, Tensors, not_finite, parameter

# exp underflows to 0 in float32 below -104; 1 + exp(-x) is 1 in float32 from 17 on.
UNDERFLOWS, SATURATES = -110.0, 30.0


def truth(inputs: OpInputs) -> Tensors:
    t, function = inputs.tensors, inputs.function
    g, beta = true_gate(t["a"], t["b"], t["A_log"], t["dt_bias"])
    if function.threshold is not None:
        x = t["a"].double() + t["dt_bias"].double()
        g = torch.where(x > function.threshold, -t["A_log"].double().exp() * x, g)
    if not function.sigmoid:
        beta = t["b"].double()
    return {"g": g, "beta": beta}


def emulate(inputs: OpInputs, at: OpRounding) -> Tensors:
    t = inputs.tensors
    g, beta = emulate_gate(t["a"], t["b"], t["A_log"], t["dt_bias"], at, inputs.function)
    return {"g": g, "beta": beta if inputs.function.sigmoid else t["b"].float()}


def domain(inputs: OpInputs, casts: Mapping[str, str]) -> list[OpFinding]:
    found = not_finite(inputs, ("a", "b"), infinite=True)
    return found + not_finite(inputs, ("A_log", "dt_bias"), infinite=True)


def exact(inputs: OpInputs) -> Tensors:
    """g where softplus is 0, or is its argument and A_log is 0; beta at 0, 1/2 and 1."""
    t = inputs.tensors
    x, b = t["a"].double() + t["dt_bias"].double(), t["b"].double()
    unrounded = x.float().double() == x
    nothing = (x <= UNDERFLOWS) & torch.isfinite(t["A_log"].double())
    whole = (t["A_log"].double() == 0) & unrounded & (x >= SATURATES)
    beta = (b <= UNDERFLOWS) | (b >= SATURATES) | (b == 0)
    return {"g": nothing | whole, "beta": beta}


def _dt_bias(inputs: OpInputs, value: Any) -> OpInputs:
    """dt_bias is taken in this dtype."""
    dt_bias = inputs.tensors["dt_bias"]
    kept = dt_bias.to(getattr(torch, str(value)))
    return inputs if torch.equal(kept.to(dt_bias.dtype), dt_bias) else inputs.changed(dt_bias=kept)


def _rolled(inputs: OpInputs, name: str) -> OpInputs:
    return inputs.changed(**{name: inputs.tensors[name].roll(1, -1)})


def _without(name: str) -> Any:
    return lambda inputs: inputs.changed(**{name: torch.zeros_like(inputs.tensors[name])})


def _swapped(inputs: OpInputs) -> OpInputs:
    return inputs.changed(a=inputs.tensors["b"], b=inputs.tensors["a"])


def _negated(name: str) -> Any:
    def change(inputs: OpInputs) -> OpInputs:
        tensor: Tensor = inputs.tensors[name]
        return inputs.changed(**{name: -tensor})

    return change


GUESSES = (
    *(
        Guess(f"softplus(x) is x from x = {x:g} on", lambda i, x=x: i.computing(threshold=x))  # type: ignore[misc]
        for x in (0.0, 1.0, 2.0, 5.0, 10.0)
    ),
    Guess("dt_bias is left out", _without("dt_bias")),
    Guess("A_log is left out (a rate of 1)", _without("A_log")),
    Guess("A_log has the wrong sign", _negated("A_log")),
    Guess("dt_bias has the wrong sign", _negated("dt_bias")),
    Guess("beta is b itself, without sigmoid", lambda i: i.computing(sigmoid=False)),
    Guess("beta is the sigmoid of -b", _negated("b")),
    Guess("a and b are swapped", _swapped),
    Guess("every head has its neighbour's A_log", lambda i: _rolled(i, "A_log")),
    Guess("every head has its neighbour's dt_bias", lambda i: _rolled(i, "dt_bias")),
    Guess("every head has its neighbour's a", lambda i: _rolled(i, "a")),
    Guess("every head has its neighbour's b", lambda i: _rolled(i, "b")),
)

OP = Op(
    name="gate",
    truth=truth,
    emulate=emulate,
    reads="b",
    function=Gate(),
    wide=("g",),
    # transformers takes the sigmoid in the model's dtype: torch computes it in float32 and rounds once.
    profiles=({}, {"gate.beta": "native"}),
    form="gate.form",
    forms={"log1p": lambda i: i.computing(log1p=True), "log": lambda i: i.computing(log1p=False)},
    clauses={"gate.softplus-threshold": parameter("threshold"), "gate.dt-bias": _dt_bias},
    domain=domain,
    exact=exact,
    guesses=GUESSES,
)
