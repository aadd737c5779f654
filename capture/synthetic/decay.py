"""Families that strain the gate: tiny decay, none, one huge value among zeros, -inf.

The idea: kernels differ in how they form exp(G_i - G_j); the families put the sums where a factored
exp(G) exp(-G) overflows, where a float32 cumsum cancels, and where a NaN guard would zero valid entries.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .family import Family, Inputs, Shape, ordinary
from .portable import Draw

TINY = 1e-12  # decay per token of `tiny-decay`
SPIKES = (-20.0, -100.0, -1000.0)
CONSTANTS = (0.0, -0.5, -1.0, -2.5, -5.0, -6.0, -20.0, -100.0)
SPIKE_SPACING = 48  # about one spike in a chunk of 64


def tiny_decay(shape: Shape, draw: Draw) -> Inputs:
    return ordinary(shape, draw, g=math.log(TINY) + draw.uniform("g", *shape.gates, low=-0.5, high=0.5))


def no_decay(shape: Shape, draw: Draw) -> Inputs:
    return ordinary(shape, draw, g=torch.zeros(shape.gates, dtype=torch.float64))


def mixed_decay(shape: Shape, draw: Draw) -> Inputs:
    """Heads 0, 3, ...: spikes among zeros; 1, 4, ...: one constant; 2, 5, ...: a constant per token."""
    columns = []
    for head in range(shape.v_heads):
        pattern = (_spikes, _constant, _switching)[head % 3]
        columns.append(pattern(shape, draw, f"g{head}"))
    return ordinary(shape, draw, g=torch.stack(columns, dim=1))


def minus_inf(shape: Shape, draw: Draw) -> Inputs:
    drawn = ordinary(shape, draw)
    for sequence, (start, length) in enumerate(shape.spans):
        if length:
            drawn.g[start + middle(draw, sequence, length)] = -math.inf
    return drawn


def middle(draw: Draw, sequence: int, length: int) -> int:
    """A token of the sequence that is no multiple of 16 where the sequence has one, [0, length)."""
    token = int(draw.integers(f"middle{sequence}", 1, low=0, high=length - 1))
    return min(token + 1, length - 1) if token % 16 == 0 else token


def _spikes(shape: Shape, draw: Draw, name: str) -> Tensor:
    """At least one spike in every sequence that has tokens."""
    g = torch.zeros(shape.n_tokens, dtype=torch.float64)
    values = torch.tensor(SPIKES, dtype=torch.float64)
    for start, length in shape.spans:
        for block in range(0, length, SPIKE_SPACING):
            width = min(SPIKE_SPACING, length - block)
            token = int(draw.integers(name, 1, low=0, high=width - 1))
            g[start + block + token] = values[draw.integers(f"{name}.value", 1, low=0, high=2)]
    return g


def _constant(shape: Shape, draw: Draw, name: str) -> Tensor:
    value = CONSTANTS[int(draw.integers(name, 1, low=0, high=len(CONSTANTS) - 1))]
    return torch.full((shape.n_tokens,), value, dtype=torch.float64)


def _switching(shape: Shape, draw: Draw, name: str) -> Tensor:
    index = draw.integers(name, shape.n_tokens, low=0, high=len(CONSTANTS) - 1)
    return torch.tensor(CONSTANTS, dtype=torch.float64)[index]


FAMILIES = {
    "tiny-decay": Family(
        "every token forgets nearly all: exp(g) near 1e-12",
        "independent unit rows",
        "log(1e-12) +- 0.5, uniform",
        "uniform in [0, 1)",
        tiny_decay,
    ),
    "no-decay": Family("the ungated delta rule", "independent unit rows", "0", "uniform in [0, 1)", no_decay),
    "mixed-decay": Family(
        "a huge gate among zeros, constants, and gates that jump from token to token",
        "independent unit rows",
        "by head: zeros with one of -20, -100, -1000 per 48 tokens; one constant; a constant per token",
        "uniform in [0, 1)",
        mixed_decay,
    ),
    "minus-inf": Family(
        "one g = -inf per sequence, all heads: a reset that the recurrence survives",
        "independent unit rows",
        "uniform in (-0.2, 0], and -inf at one token of each sequence",
        "uniform in [0, 1)",
        minus_inf,
    ),
}
