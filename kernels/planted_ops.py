"""Operations of the layer with one fault each, for tests and for `gdncheck selftest`: kernels by import path.

The idea: what people get wrong around the rule is a short list (a window off by one, a SiLU or a weight left
out, an eps on the wrong side of the root, a sign), so each item is a function that computes exactly that, in
the precision of the honest emulation; everything else about it is sound. `FAULTS` says where each is.

    gdncheck diff CASE --op core --kernel emulation.core,norm=gdncheck.kernels.planted_ops:norm_no_weight
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..reference.conv import causal_conv
from ..reference.emulation_ops import (
    OpRounding,
    emulate_conv,
    emulate_gate,
    emulate_l2norm,
    emulate_norm,
)
from ..reference.op_functions import Conv, Gate, L2Norm, Norm

Heads = tuple[int, int, int, int]
AT = OpRounding()
SHARP = 2.0
"""From where a wrong softplus is linear: softplus(2) is 2.127."""


class Fault(NamedTuple):
    """Where a fault is, and on which inputs it can be seen."""

    op: str
    families: tuple[str, ...]
    """Families of `capture.synthetic.core` whose values show it."""


USUAL = ("core-qwen", "core-wide-gate", "core-quiet")
FAULTS: dict[str, Fault] = {
    "conv_window_shifted": Fault("conv", USUAL),
    "conv_taps_reversed": Fault("conv", USUAL),
    "conv_no_silu": Fault("conv", USUAL),
    "conv_state_not_advanced": Fault("conv", USUAL),
    "conv_past_ignored": Fault("conv", USUAL),
    "split_k_before_q": Fault("split", USUAL),
    "l2norm_missing": Fault("l2norm", USUAL),
    "l2norm_eps_outside": Fault("l2norm", ("core-quiet",)),
    "gate_softplus_threshold": Fault("gate", ("core-wide-gate",)),
    "gate_sign_of_A_log": Fault("gate", ("core-qwen", "core-quiet")),
    "gate_no_dt_bias": Fault("gate", USUAL),
    "gate_beta_without_sigmoid": Fault("gate", USUAL),
    "norm_no_weight": Fault("norm", USUAL),
    "norm_gate_first": Fault("norm", ("core-qwen", "core-wide-gate")),
    "norm_z_of_another_head": Fault("norm", USUAL),
}


def _conv(x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor, function: Conv) -> Tensor:
    return emulate_conv(x, weight, None, state, cu_seqlens, AT, function).to(x.dtype)


def _left(x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    _, final = causal_conv(x, weight, None, state, cu_seqlens)
    return final.to(x.dtype if state is None else state.dtype)


def conv_window_shifted(
    conv_input: Tensor, conv_weight: Tensor, cu_seqlens: Tensor, conv_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The window ends one token before the current one: the newest tap is lost."""
    shifted = torch.cat([conv_weight[:, 1:], torch.zeros_like(conv_weight[:, :1])], 1)
    return (
        _conv(conv_input, shifted, conv_state, cu_seqlens, Conv()),
        _left(conv_input, conv_weight, conv_state, cu_seqlens),
    )


def conv_taps_reversed(
    conv_input: Tensor, conv_weight: Tensor, cu_seqlens: Tensor, conv_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The first tap meets the current token."""
    return (
        _conv(conv_input, conv_weight.flip(1), conv_state, cu_seqlens, Conv()),
        _left(conv_input, conv_weight, conv_state, cu_seqlens),
    )


def conv_no_silu(
    conv_input: Tensor, conv_weight: Tensor, cu_seqlens: Tensor, conv_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """SiLU is left out."""
    return (
        _conv(conv_input, conv_weight, conv_state, cu_seqlens, Conv(activation=None)),
        _left(conv_input, conv_weight, conv_state, cu_seqlens),
    )


def conv_state_not_advanced(
    conv_input: Tensor, conv_weight: Tensor, cu_seqlens: Tensor, conv_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The state is handed on as it was found."""
    final = _left(conv_input, conv_weight, conv_state, cu_seqlens)
    return (
        _conv(conv_input, conv_weight, conv_state, cu_seqlens, Conv()),
        torch.zeros_like(final) if conv_state is None else conv_state.clone(),
    )


def conv_past_ignored(
    conv_input: Tensor, conv_weight: Tensor, cu_seqlens: Tensor, conv_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Every sequence starts from zeros, whatever its state holds."""
    return (
        _conv(conv_input, conv_weight, None, cu_seqlens, Conv()),
        _left(conv_input, conv_weight, conv_state, cu_seqlens),
    )


def split_k_before_q(conv_output: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """The channels are read in the order k|q|v."""
    n_key, key_dim, n_value, value_dim = heads
    keys = n_key * key_dim
    k, q, v = torch.split(conv_output, [keys, keys, n_value * value_dim], dim=-1)
    return (
        q.reshape(-1, n_key, key_dim).contiguous(),
        k.reshape(-1, n_key, key_dim).contiguous(),
        v.reshape(-1, n_value, value_dim).contiguous(),
    )


def l2norm_missing(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q and k are handed on as they are."""
    return q.clone(), k.clone()


def l2norm_eps_outside(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """x / (sqrt(sum(x^2)) + eps)."""
    function = L2Norm(place="outside")
    return emulate_l2norm(q, AT, function).to(q.dtype), emulate_l2norm(k, AT, function).to(k.dtype)


def _gate(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, function: Gate | None = None
) -> tuple[Tensor, Tensor]:
    g, beta = emulate_gate(a, b, A_log, dt_bias, AT, function)
    return g, beta.to(b.dtype)


def gate_softplus_threshold(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """softplus is linear from 2 on, where it still is 6 % above its argument."""
    return _gate(a, b, A_log, dt_bias, replace(Gate(), threshold=SHARP))


def gate_sign_of_A_log(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The rate is exp(-A_log)."""
    return _gate(a, b, -A_log, dt_bias)


def gate_no_dt_bias(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """dt_bias is left out."""
    return _gate(a, b, A_log, torch.zeros_like(dt_bias))


def gate_beta_without_sigmoid(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """beta is b."""
    return _gate(a, b, A_log, dt_bias)[0], b.clone()


def _norm(x: Tensor, z: Tensor, weight: Tensor, eps: float | None, function: Norm | None = None) -> Tensor:
    function = replace(function or Norm(), eps=eps or Norm.eps)
    return emulate_norm(x, z, weight, AT, function).to(z.dtype)


def norm_no_weight(core_output: Tensor, z: Tensor, norm_weight: Tensor, eps: float | None = None) -> Tensor:
    """The weight is left out."""
    return _norm(core_output, z, torch.ones_like(norm_weight), eps)


def norm_gate_first(core_output: Tensor, z: Tensor, norm_weight: Tensor, eps: float | None = None) -> Tensor:
    """The gate comes before the norm."""
    return _norm(core_output, z, norm_weight, eps, Norm(gate="before"))


def norm_z_of_another_head(
    core_output: Tensor, z: Tensor, norm_weight: Tensor, eps: float | None = None
) -> Tensor:
    """Every head is gated by its neighbour's z."""
    return _norm(core_output, z.roll(1, 1), norm_weight, eps)
