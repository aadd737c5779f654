"""Families that look like a trained model: what Qwen3-Next layers hand to the rule, and unnormalised keys.

The idea: gates come out of A_log, dt_bias and a projection as in the model, keys out of a short causal
mixing of SiLU values, so neighbours are correlated and share a mean direction as real keys do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .family import Family, Inputs, Shape, ordinary
from .portable import Draw, exp, log, sigmoid, softplus, unit

DECAY_RATES = (0.02, 16.0)  # exp(A_log) per head, log-uniform; 16 is the upper end of the model's init
TIME_STEPS = (1e-3, 1e-1)  # softplus(dt_bias) per head, log-uniform, as Mamba-style layers are initialised


def _log_uniform(draw: Draw, name: str, count: int, span: tuple[float, float]) -> Tensor:
    return exp(draw.uniform(name, count, low=math.log(span[0]), high=math.log(span[1])))


def gates(shape: Shape, draw: Draw) -> Tensor:
    """g = -exp(A_log) * softplus(a + dt_bias), [T, HV]."""
    rate = _log_uniform(draw, "A_log", shape.v_heads, DECAY_RATES)
    step = _log_uniform(draw, "dt_bias", shape.v_heads, TIME_STEPS)
    dt_bias = step + log(1.0 - exp(-step))  # inverse of softplus
    return -rate * softplus(1.5 * draw.normal("a", *shape.gates) + dt_bias)


def mixed_keys(shape: Shape, draw: Draw, name: str) -> Tensor:
    """Unit rows: a causal two-token mixture of SiLU values around a per-channel mean, [T, HK, K]."""
    now = draw.silu_of_normal(name, *shape.keys)
    before = torch.cat((torch.zeros_like(now[:1]), now[:-1]))
    before[[start for start, length in shape.spans if length]] = 0.0
    mean = 0.3 * draw.normal(f"{name}.mean", 1, shape.k_heads, shape.key_dim)
    return unit(mean + now + 0.5 * before)


def qwen(shape: Shape, draw: Draw) -> Inputs:
    return ordinary(
        shape,
        draw,
        q=mixed_keys(shape, draw, "q"),
        k=mixed_keys(shape, draw, "k"),
        g=gates(shape, draw),
        beta=sigmoid(1.5 * draw.normal("b", *shape.gates)),
    )


def gaussian(shape: Shape, draw: Draw) -> Inputs:
    return ordinary(
        shape, draw, q=draw.normal("q", *shape.keys), k=draw.normal("k", *shape.keys),
        g=gates(shape, draw), qk="raw",
    )  # fmt: skip


def forgotten_l2norm(shape: Shape, draw: Draw) -> Inputs:
    return gaussian(shape, draw)._replace(qk="normalised")


def long_memory(shape: Shape, draw: Draw) -> Inputs:
    return ordinary(
        shape, draw,
        g=-draw.uniform("g", *shape.gates, low=0.0, high=1e-4),
        beta=draw.uniform("beta", *shape.gates, low=0.0, high=0.2),
    )  # fmt: skip


FAMILIES = {
    "qwen": Family(
        "what a trained Qwen3-Next layer hands to the rule",
        "unit rows, a causal two-token mixture of SiLU values: neighbours have cosine about 0.5",
        "-exp(A_log) softplus(a + dt_bias): A_log log-uniform in 0.02..16 per head, a ~ N(0, 1.5)",
        "sigmoid(N(0, 1.5))",
        qwen,
    ),
    "gaussian": Family(
        "q and k before l2norm, handed over as raw",
        "independent standard normal, norm about sqrt(K), flagged raw",
        "as qwen",
        "uniform in [0, 1)",
        gaussian,
    ),
    "forgotten-l2norm": Family(
        "a caller that forgot l2norm: raw keys flagged normalised (outside the domain)",
        "as gaussian, but flagged normalised: norm about sqrt(K) instead of 1",
        "as qwen",
        "uniform in [0, 1)",
        forgotten_l2norm,
    ),
    "long-memory": Family(
        "a head that forgets almost nothing",
        "independent unit rows",
        "uniform in (-1e-4, 0]",
        "uniform in [0, 0.2)",
        long_memory,
    ),
}
