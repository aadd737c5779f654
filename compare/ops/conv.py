"""conv: the causal depthwise convolution with SiLU, and the state that it leaves behind.

Contract clauses with numbers: `conv.activation` (silu), `cast.conv.pre` (torch rounds the sum to the model's
dtype before SiLU), `cast.conv.product`, `cast.conv.sum`. Domain: finite inputs, weights and states. The state
left behind holds inputs, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...kernels.ops.conv_state import starting_conv_state
from ...reference.conv import causal_conv
from ...reference.emulation_ops import OpRounding, emulate_conv
from ...reference.op_functions import Conv
from .op import Guess, Op, OpFinding, OpInputs, Tensors, not_finite, parameter

UNDERFLOWS, SATURATES = -110.0, 30.0
LARGEST_SUM = 2.0**24


def truth(inputs: OpInputs) -> Tensors:
    t = inputs.tensors
    output, state = causal_conv(
        t["conv_input"], t["conv_weight"], t.get("conv_bias"), starting_conv_state(t), t["cu_seqlens"],
        inputs.function.activation,
    )  # fmt: skip
    if inputs.function.stale_state:
        before = starting_conv_state(t)
        state = torch.zeros_like(state) if before is None else before.double()
    return {"conv_output": output, "final_conv_state": state}


def emulate(inputs: OpInputs, at: OpRounding) -> Tensors:
    t = inputs.tensors
    output = emulate_conv(
        t["conv_input"], t["conv_weight"], t.get("conv_bias"), starting_conv_state(t), t["cu_seqlens"], at,
        inputs.function,
    )  # fmt: skip
    return {"conv_output": output, "final_conv_state": truth(inputs)["final_conv_state"].float()}


def domain(inputs: OpInputs, casts: Mapping[str, str]) -> list[OpFinding]:
    found = not_finite(inputs, ("conv_input", "conv_weight", "conv_bias"))
    state = starting_conv_state(inputs.tensors)
    if state is not None and not bool(torch.isfinite(state).all()):
        sequence = int((~torch.isfinite(state)).flatten(1).any(-1).nonzero()[0])
        row = int(inputs.cu_seqlens[sequence])
        found.append(OpFinding("conv_state", row, f"conv_state of sequence {sequence} is not finite"))
    return found


def exact(inputs: OpInputs) -> Tensors:
    """Small integers whose sum is 0, or so large that SiLU is the sum, or so small that it is 0."""
    t = inputs.tensors
    x, weight = t["conv_input"].double(), t["conv_weight"].double()
    state = starting_conv_state(t)
    integers = _grid(x) and _grid(weight) and (state is None or _grid(state.double()))
    bias = t.get("conv_bias")
    if not integers or (bias is not None and not _grid(bias.double())):
        return {"conv_output": torch.zeros_like(x, dtype=torch.bool)}
    largest = max(float(x.abs().max()), 0.0 if state is None else float(state.double().abs().max()))
    total, _ = causal_conv(x, weight, bias, state, t["cu_seqlens"], None)
    safe = largest * float(weight.abs().sum(-1).max()) <= LARGEST_SUM * _unit(x)
    kept = total.to(t["conv_input"].dtype).double() == total
    quiet = (total == 0) | (total >= SATURATES) | (total <= UNDERFLOWS)
    return {"conv_output": kept & quiet & safe}


def _grid(x: Tensor) -> bool:
    """Whether all entries are multiples of the smallest one's power of two, within 24 bits of it."""
    return bool(torch.isfinite(x).all()) and bool((x == (x / _unit(x)).round() * _unit(x)).all())


def _unit(x: Tensor) -> float:
    """A power of two that divides what is usually there: 1, or more for large values alone."""
    smallest = x[x != 0].abs()
    if not smallest.numel() or float(smallest.min()) < 1:
        return 1.0
    return float(2.0 ** (torch.frexp(smallest.min())[1].item() - 1)) if float(smallest.min()) > 256 else 1.0


def _shifted(by: int) -> Guess:
    def change(inputs: OpInputs) -> OpInputs:
        weight = torch.zeros_like(inputs.tensors["conv_weight"])
        source = inputs.tensors["conv_weight"]
        if by > 0:
            weight[:, :-by] = source[:, by:]
        else:
            weight[:, -by:] = source[:, :by]
        return inputs.changed(conv_weight=weight)

    way = "earlier" if by > 0 else "later"
    return Guess(f"the window is {abs(by)} token {way} than it should be", change)


def _flipped(inputs: OpInputs) -> OpInputs:
    return inputs.changed(conv_weight=inputs.tensors["conv_weight"].flip(-1))


def _no_past(inputs: OpInputs) -> OpInputs:
    rest = {n: x for n, x in inputs.tensors.items() if n not in ("conv_state", "conv_pool", "slot_indices")}
    return OpInputs(rest, inputs.function, inputs.cu_seqlens, inputs.heads)


def _one_sequence(inputs: OpInputs) -> OpInputs:
    cu = inputs.tensors["cu_seqlens"]
    return _no_past(inputs.changed(cu_seqlens=torch.stack([cu[0], cu[-1]])))


def _no_bias(inputs: OpInputs) -> OpInputs:
    bias = inputs.tensors.get("conv_bias")
    return inputs if bias is None else inputs.changed(conv_bias=torch.zeros_like(bias))


GUESSES = (
    Guess("SiLU is left out", lambda i: i.computing(activation=None)),
    _shifted(1),
    _shifted(-1),
    Guess("the taps are in the wrong order", _flipped),
    Guess("the conv state is not advanced", lambda i: i.computing(stale_state=True)),
    Guess("every sequence starts from zeros instead of its state", _no_past),
    Guess("conv_bias is left out", _no_bias),
)

OP = Op(
    name="conv",
    truth=truth,
    emulate=emulate,
    reads="conv_input",
    function=Conv(),
    copies=("final_conv_state",),
    profiles=({}, {"conv.pre": "native"}),
    clauses={"conv.activation": parameter("activation")},
    domain=domain,
    exact=exact,
    guesses=GUESSES,
)
