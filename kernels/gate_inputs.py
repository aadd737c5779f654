"""Raw gate inputs for kernels that make g and beta themselves, from a call that has g and beta.

The idea: such a kernel computes g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b) in float32.
Where the call has the layer's own a, b, A_log and dt_bias they are passed on. Else inputs are made that give
the call's g and beta back to float32's precision: 0, a decay above 20 and a beta of 0 or 1 exactly.

Leaves to others: kernels that take g and beta, the formula itself in float64 (`reference.gate`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..capture.errors import Refused
from . import layouts

RAW = ("a", "b", "A_log", "dt_bias")
NEVER = -1e4  # softplus of it is exactly 0 in float32
LEAST_SCALE = -24  # power of two: below it a decay differs from 1 by less than float32 resolves


class GateInputs(NamedTuple):
    """What the kernel is handed."""

    A_log: Tensor
    """[HV] float32."""
    a: Tensor
    """[T, HV]."""
    dt_bias: Tensor
    """[HV]."""
    b: Tensor
    """[T, HV]."""
    given: bool
    """The call's own; else made from g and beta."""


def gate_inputs(name: str, tensors: Mapping[str, Tensor], beta: Tensor | None = None) -> GateInputs:
    """The raw inputs of a call. beta: stands in for the call's own (rounded as the layer rounds it).

    Raises Refused where g and beta are none that such a kernel can make.
    """
    if all(raw in tensors for raw in RAW):
        return GateInputs(tensors["A_log"].float(), tensors["a"], tensors["dt_bias"], tensors["b"], True)
    g = tensors["g"]
    beta = tensors["beta"] if beta is None else beta
    if bool((g > 0).any()):
        raise Refused(f"{name} makes the gate itself and cannot grow a state; g has a value above 0")
    if bool(((beta < 0) | (beta > 1)).any()):
        raise Refused(f"{name} makes beta by a sigmoid; beta has a value outside [0, 1]")
    scale = scale_of_heads(g)
    a = inverse_softplus(-g.double() / scale.double())
    b = torch.logit(beta.double()).clamp(-layouts.SATURATED_LOGIT, layouts.SATURATED_LOGIT)
    zeros = torch.zeros(g.shape[1], dtype=torch.float32, device=g.device)
    return GateInputs(scale.double().log().float(), a.float(), zeros, b.float(), False)


def scale_of_heads(g: Tensor) -> Tensor:
    """[HV] float32, exp(A_log) of each head: 1, or a power of two that its largest |g| just stays below.

    log(1 + exp(x)) in float32 resolves 2^-24 absolutely, so a head of small decays needs a small factor.
    """
    size = torch.where(torch.isfinite(g), g.abs(), 0.0).amax(0)
    power = torch.log2(size.double().clamp_min(2.0**LEAST_SCALE)).ceil().clamp(LEAST_SCALE, 0)
    return torch.where(size > 0, torch.exp2(power), 1.0).float()


def inverse_softplus(y: Tensor) -> Tensor:
    """x with log(1 + exp(x)) = y for y >= 0, float64; NEVER for 0, y itself above the kernels' threshold."""
    inverse = torch.where(y > 20.0, y, torch.log(torch.expm1(y.clamp(max=20.0))))
    return torch.where(y == 0, NEVER, inverse)


assert math.exp(NEVER) == 0.0
