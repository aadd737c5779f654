"""Families that strain the triangular solve: parallel keys, identical keys, beta up to 2, beta 0.

The idea: the conditioning of I + A is set by the angles between keys of one chunk and by beta; each family
fixes both by construction, so the documented range holds for every pair, not on average.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .family import Family, Inputs, Shape, ordinary
from .portable import Draw, total, unit

COSINE = 0.99  # least cosine between any two keys of a head in `parallel-keys`, before rounding


def parallel(shape: Shape, draw: Draw) -> Tensor:
    """Unit keys at most half of arccos(COSINE) away from one axis per head, [T, HK, K]."""
    axis = unit(draw.normal("k.axis", 1, shape.k_heads, shape.key_dim))
    noise = draw.normal("k", *shape.keys)
    across = unit(noise - total(noise * axis) * axis)
    largest = math.sqrt((1.0 - COSINE) / 2.0)  # sine of the half angle
    sine = draw.uniform("k.angle", shape.n_tokens, shape.k_heads, 1, high=largest)
    return unit(axis * torch.sqrt(1.0 - sine * sine) + across * sine)


def parallel_keys(shape: Shape, draw: Draw) -> Inputs:
    return ordinary(
        shape, draw, k=parallel(shape, draw), g=-draw.uniform("g", *shape.gates, high=0.02),
        beta=draw.uniform("beta", *shape.gates, low=0.9),
    )  # fmt: skip


def identical_keys(shape: Shape, draw: Draw) -> Inputs:
    axis = unit(draw.normal("k.axis", 1, shape.k_heads, shape.key_dim))
    return ordinary(
        shape, draw, k=axis.expand(shape.keys).clone(),
        g=torch.zeros(shape.gates, dtype=torch.float64),
        beta=torch.ones(shape.gates, dtype=torch.float64),
    )  # fmt: skip


def negative_eigenvalues(shape: Shape, draw: Draw) -> Inputs:
    beta = draw.uniform("beta", *shape.gates, high=2.0)
    top = draw.uniform("beta.top", *shape.gates) < 0.05
    return ordinary(shape, draw, beta=torch.where(top, 2.0, beta))


def beta_zero(shape: Shape, draw: Draw) -> Inputs:
    return ordinary(shape, draw, beta=torch.zeros(shape.gates, dtype=torch.float64))


FAMILIES = {
    "parallel-keys": Family(
        "a badly conditioned solve: keys that nearly coincide",
        "unit rows, any two of a head at cosine 0.99..1; q independent",
        "uniform in (-0.02, 0]",
        "uniform in [0.9, 1)",
        parallel_keys,
    ),
    "identical-keys": Family(
        "the worst solve inside the domain: one key, beta 1",
        "one unit row per head, the same for every token; q independent",
        "0",
        "1",
        identical_keys,
    ),
    "negative-eigenvalues": Family(
        "beta up to 2, as layers with negative eigenvalues allow (a hint of the domain check)",
        "independent unit rows",
        "uniform in (-0.2, 0]",
        "uniform in [0, 2), one in twenty exactly 2",
        negative_eigenvalues,
    ),
    "beta-zero": Family(
        "nothing is ever written: the output is the decayed state",
        "independent unit rows",
        "uniform in (-0.2, 0]",
        "0",
        beta_zero,
    ),
}
