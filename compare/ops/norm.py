"""norm: the gated RMSNorm, x / sqrt(mean(x^2) + eps) * weight * silu(z).

Contract clauses with numbers: `norm.eps` (the model's own, 1e-6), `norm.order` (after: norm, then gate;
before: gate, then norm), `norm.weight-offset` (0; 1 where a weight is stored less one), `cast.norm.normed`
and `cast.norm.weighted` (transformers rounds to the model's dtype before the weight). Domain: finite x and z
whose mean square stays below float32's largest number. A zero row is zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...reference.emulation_ops import OpRounding, emulate_norm
from ...reference.gate import silu
from ...reference.norm import gated_rms_norm
from ...reference.op_functions import Norm
from ...reference.rounding import FORMATS, format_of
from .op import Guess, Op, OpFinding, OpInputs, Tensors, not_finite, parameter

SATURATES = 30.0


def truth(inputs: OpInputs) -> Tensors:
    t, f = inputs.tensors, inputs.function
    x, z = t["core_output"].double(), t["z"].double()
    weight = t["norm_weight"].double() + f.weight_offset
    if f.gate == "before":
        return {"normed": gated_rms_norm(x * silu(z), None, weight, f.eps)}
    if f.gate == "none":
        return {"normed": gated_rms_norm(x, None, weight, f.eps)}
    return {"normed": gated_rms_norm(x, z, weight, f.eps)}


def emulate(inputs: OpInputs, at: OpRounding) -> Tensors:
    t = inputs.tensors
    return {"normed": emulate_norm(t["core_output"], t["z"], t["norm_weight"], at, inputs.function)}


def domain(inputs: OpInputs, casts: Mapping[str, str]) -> list[OpFinding]:
    found = not_finite(inputs, ("core_output", "z", "norm_weight"))
    x = inputs.tensors["core_output"]
    fmt = casts.get("norm.square", "fp32")
    largest = FORMATS[format_of(x.dtype) if fmt == "native" else fmt].largest
    total = x.double().square().sum(-1)
    over = (torch.isfinite(total) & (total > largest)).flatten(1).any(-1).nonzero()
    if len(over):
        row = int(over[0])
        found.append(
            OpFinding(
                "core_output", row,
                f"core_output has a row of norm {float(total[row].max()) ** 0.5:.3g}, whose square is beyond "
                f"{largest:.3g}, the largest number where the sum is kept",
            )
        )  # fmt: skip
    return found


def exact(inputs: OpInputs) -> Tensors:
    """Rows of one power of two (or zero) per entry whose mean square is a power of 4 that absorbs eps, where
    z is 0 or large enough for SiLU to be z, and products fit the stored dtype."""
    t = inputs.tensors
    x, z = t["core_output"].double(), t["z"].double()
    mean = x.square().mean(-1, keepdim=True)
    entries = (torch.frexp(x)[0].abs() == 0.5) | (x == 0)
    uniform = entries.all(-1, keepdim=True) & (torch.frexp(mean.sqrt())[0] == 0.5)
    row = (uniform & (mean * 2.0**-25 > inputs.function.eps)) | (mean == 0)
    gated = (z == 0) | (z >= SATURATES)
    want = truth(inputs)["normed"]
    weighted = x * mean.clamp_min(1e-300).rsqrt() * t["norm_weight"].double()
    dtype = t["z"].dtype
    fits = (weighted.to(dtype).double() == weighted) & (want.to(dtype).double() - want).abs().lt(
        want.abs() * 2.0**-30 + 1e-300
    )
    return {"normed": row.expand_as(x) & gated & fits}


GUESSES = (
    Guess(
        "norm_weight is left out", lambda i: i.changed(norm_weight=torch.ones_like(i.tensors["norm_weight"]))
    ),
    Guess("the gate comes before the norm", lambda i: i.computing(gate="before")),
    Guess("the gate is left out", lambda i: i.computing(gate="none")),
    Guess("norm_weight is taken as stored less one", lambda i: i.computing(weight_offset=1.0)),
    Guess("every head has its neighbour's z", lambda i: i.changed(z=i.tensors["z"].roll(1, 1))),
    Guess("every head has the next one's z", lambda i: i.changed(z=i.tensors["z"].roll(-1, 1))),
    Guess("every token has the token's before it z", lambda i: i.changed(z=i.tensors["z"].roll(1, 0))),
    *(
        Guess(f"eps is {value:g}", lambda i, value=value: i.computing(eps=value), excusable=True)  # type: ignore[misc]
        for value in (1e-5, 1e-8, 1e-12, 1e-3, 0.0)
    ),
)

OP = Op(
    name="norm",
    truth=truth,
    emulate=emulate,
    reads="z",
    weight="norm_weight",
    function=Norm(),
    profiles=(
        {},
        {"norm.normed": "native"},
        {"norm.normed": "native", "norm.weighted": "promoted"},
    ),
    clauses={
        "norm.eps": parameter("eps"),
        "norm.order": parameter("gate"),
        "norm.weight-offset": parameter("weight_offset"),
    },
    domain=domain,
    exact=exact,
    guesses=GUESSES,
)
