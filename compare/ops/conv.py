"""conv and conv-update: the causal depthwise convolution with SiLU, and the state that it leaves behind.

Contract clauses with numbers: `conv.activation` (silu), `cast.conv.pre` (torch rounds the sum to the model's
dtype before SiLU), `cast.conv.product`, `cast.conv.sum`. Domain: finite inputs, weights and states, and no
product beyond a declared 16-bit format. The state left behind holds inputs, bit for bit. Beside this file:
rows of a pool (`conv_slots`), the bound of every entry (`conv_bound`), and the further calls that a kernel is
asked for, whatever the case is like (`conv_variants`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.ops.conv_state import left_rows, starting_conv_state, starting_rows
from ...reference.conv import causal_conv, final_conv_state
from ...reference.emulation_ops import OpRounding, emulate_conv
from ...reference.op_functions import Conv
from .conv_bound import check_bound
from .conv_slots import check_pool, without_padding
from .conv_variants import relations_of
from .op import Guess, Op, OpFinding, OpInputs, Tensors, not_finite, parameter

UNDERFLOWS, SATURATES = -110.0, 30.0
LARGEST_SUM = 2.0**24
CONV_PAST = ("conv_state", "conv_pool", "slot_indices", "read_slot_indices", "num_accepted")


def truth(inputs: OpInputs) -> Tensors:
    t = inputs.tensors
    output, _ = causal_conv(
        t["conv_input"], t["conv_weight"], t.get("conv_bias"), starting_conv_state(t), t["cu_seqlens"],
        inputs.function.activation,
    )  # fmt: skip
    return {"conv_output": output, "final_conv_state": _state_left(inputs)}


def _state_left(inputs: OpInputs) -> Tensor:
    """[N, D, L] float64: the rows that the call leaves; those it found, for a state that stands still."""
    t = inputs.tensors
    x, start = t["conv_input"], starting_conv_state(t)
    if start is None:
        start = x.new_zeros((len(t["cu_seqlens"]) - 1, x.shape[1], t["conv_weight"].shape[1] - 1))
    if inputs.function.stale_state:
        before = starting_rows(t)
        return (start if before is None else before).double()
    return left_rows(t, final_conv_state(x, start, t["cu_seqlens"]))


def emulate(inputs: OpInputs, at: OpRounding) -> Tensors:
    t = inputs.tensors
    output = emulate_conv(
        t["conv_input"], t["conv_weight"], t.get("conv_bias"), starting_conv_state(t), t["cu_seqlens"], at,
        inputs.function,
    )  # fmt: skip
    return {"conv_output": output, "final_conv_state": _state_left(inputs).float()}


def domain(inputs: OpInputs, casts: Mapping[str, str]) -> list[OpFinding]:
    found = not_finite(inputs, ("conv_input", "conv_weight", "conv_bias"))
    state = starting_conv_state(inputs.tensors)
    if state is not None and not bool(torch.isfinite(state).all()):
        sequence = int((~torch.isfinite(state)).flatten(1).any(-1).nonzero()[0])
        row = int(inputs.cu_seqlens[sequence])
        found.append(OpFinding("conv_state", row, f"conv_state of sequence {sequence} is not finite"))
    return found or _overflowing_products(inputs, casts)


def _overflowing_products(inputs: OpInputs, casts: Mapping[str, str]) -> list[OpFinding]:
    """float16 holds 65504: a kernel that says it multiplies in its input's dtype overflows beyond."""
    x, weight = inputs.tensors["conv_input"], inputs.tensors["conv_weight"]
    if casts.get("conv.product") != "native" or x.dtype != torch.float16 or weight.dtype != torch.float16:
        return []
    products = x.double().abs() * weight.double().abs().amax(-1)
    over = (products > torch.finfo(torch.float16).max).any(-1).nonzero().flatten()
    if not len(over):
        return []
    worst = float(products[over[0]].max())
    return [OpFinding("conv_input", int(over[0]), f"a product of {worst:g} overflows float16")]


def exact(inputs: OpInputs) -> Tensors:
    """Small integers whose sum is 0, or so large that SiLU is the sum, or so small that it is 0.

    Channel by channel: every product fits the significand of the input's dtype, every partial sum float32's.
    """
    t = inputs.tensors
    x, weight, bias = t["conv_input"], t["conv_weight"].double(), t.get("conv_bias")
    state = starting_conv_state(t)
    total, _ = causal_conv(x, weight, bias, state, t["cu_seqlens"], None)
    peak = x.double().abs().amax(0) if len(x) else weight.new_zeros(x.shape[1])
    whole = _integers(x, 0) & _integers(weight, 1)
    if state is not None and len(state):
        peak = torch.maximum(peak, state.double().abs().amax((0, 2)))
        whole = whole & _integers(state, (0, 2))
    largest = peak * weight.abs().sum(-1)
    if bias is not None:
        whole, largest = whole & _integers(bias[None], 0), largest + bias.double().abs()
    products = peak * weight.abs().amax(-1) <= 2.0 / torch.finfo(x.dtype).eps
    kept = total.to(x.dtype).double() == total
    quiet = (total == 0) | (total >= SATURATES) | (total <= UNDERFLOWS)
    left = torch.ones_like(_state_left(inputs), dtype=torch.bool)
    exactly = kept & quiet & (whole & products & (largest <= LARGEST_SUM))
    return {"conv_output": exactly, "final_conv_state": left}


def _integers(x: Tensor, over: int | tuple[int, ...]) -> Tensor:
    """Whether all entries along some dimensions are finite integers."""
    wide = x.double()
    return (torch.isfinite(wide) & (wide == wide.round())).all(over)


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
    rest = {n: x for n, x in inputs.tensors.items() if n not in CONV_PAST}
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
    points="conv",
    truth=truth,
    emulate=emulate,
    reads="conv_input",
    function=Conv(),
    copies=("final_conv_state",),
    profiles=({}, {"conv.pre": "native"}, {"conv.product": "native"}),
    clauses={"conv.activation": parameter("activation")},
    domain=domain,
    exact=exact,
    guesses=GUESSES,
    checks=(check_bound,),
    owned=without_padding,
    beside=check_pool,
    further=relations_of,
)
UPDATE = replace(OP, name="conv-update")
