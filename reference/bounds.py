"""Bounds on a state and on its error, from the inputs alone: one pass, per token and value head.

The idea: where a step's matrix a (I - beta k k^T) cannot stretch a vector (decay a <= 1, beta |k|^2 <= 1),
the norm of the state obeys a scalar recurrence, B_t = a_t B_{t-1} + beta_t |k_t| |v_t|, and so does the
norm of the error that rounding adds to it. Scalar recurrences are scanned for all tokens, heads and
packed sequences at once. Nothing here runs or judges a kernel.

Sources: Higham & Mary 2019 (probabilistic rounding model), Ipsen & Zhou arXiv 1906.10465.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Rounded unit keys: |k|^2 of a bf16 key that was normalised and rounded stays below 1 + 2^-7.
UNIT_KEY_SLACK = 2.0**-7
# The model's constant: an inner product of length K errs by at most c sqrt(K) u times its magnitude with
# probability 1 - 2 exp(-c^2 / 2); 6 makes that 3e-8 per product.
PROBABILISTIC_C = 6.0
# Roundings of a decay factor: of G twice (in G_i - G_j), of exp, of the product that it enters.
DECAY_ROUNDINGS = 4.0
# The longest stretch of tokens over which kernels sum log decays: the largest usual chunk.
DECAY_STRETCH = 128


def scan(decay: Tensor, gain: Tensor, start: Tensor, cu_seqlens: Tensor) -> Tensor:
    """x_t = decay_t x_{t-1} + gain_t inside every sequence, x before its first token being `start`.

    decay, gain: [T, H] float64, finite, decay >= 0; start: [N, H]. Returns x, [T, H].
    Doubling: log2 of the longest sequence many steps, no loop over tokens.
    """
    factor, total = decay.clone(), gain.clone()
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    filled = lengths > 0
    first = cu_seqlens[:-1][filled]
    total[first] += factor[first] * start[filled]
    # A zero factor at a sequence's first token keeps its predecessor in the packing out.
    factor[first] = 0.0
    longest = int(lengths.max()) if len(lengths) else 0
    step = 1
    while step < longest:
        total[step:] = total[step:] + factor[step:] * total[:-step]
        factor[step:] = factor[step:] * factor[:-step]
        step *= 2
    return total


def last_of_each(per_token: Tensor, start: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The value after the last token of each sequence, `start` where it has none; [T, H] -> [N, H]."""
    result = start.clone()
    filled = cu_seqlens[1:] > cu_seqlens[:-1]
    result[filled] = per_token[cu_seqlens[1:][filled] - 1]
    return result


@dataclass(frozen=True)
class StateBounds:
    """Tier 1: what the exact state and output cannot exceed."""

    state: Tensor
    """[T, HV] bound on |S_t|_F."""
    final: Tensor
    """[N, HV] bound on the final state's norm."""
    output: Tensor
    """[T, HV] bound on |o_t|."""
    growth: Tensor
    """[T, HV] beta_t |k_t|^2."""
    contracting: Tensor
    """[T, HV] bool: decay <= 1 and 0 <= beta |k|^2 <= 1 + slack for every token of the sequence so far."""
    final_contracting: Tensor
    """[N, HV] bool: the same for the whole sequence."""


@dataclass(frozen=True)
class Roundoffs:
    """Unit round-offs of a kernel, as its contract declares them."""

    state: float
    """Of the state while it is carried on (2^-24 for float32 registers)."""
    accumulate: float
    """Of a dot product's accumulation."""
    operand: float
    """Of the operands of dot products (2^-8 for bf16 nearest, 2^-11 for fp16 and tf32)."""
    output: float
    """Of the stored output."""
    stored_state: float = 0.0
    """Of a state that is stored between steps or at the end."""
    underflow: float = 0.0
    """Absolute error of a dot operand that is too small for its format (`smallest_error`)."""
    output_underflow: float = 0.0
    """The same of a stored output entry."""
    state_underflow: float = 0.0
    """The same of a stored state entry."""


def smallest_error(dtype: torch.dtype) -> float:
    """Largest absolute error of rounding a number that a dtype cannot resolve relatively.

    Half a subnormal step in fp16; a GPU may flush subnormal numbers of bf16 and fp32, so all of them there.
    """
    info = torch.finfo(dtype)
    normal = float(info.smallest_normal)
    return normal * float(info.eps) / 2 if dtype == torch.float16 else normal


@dataclass(frozen=True)
class ErrorBounds:
    """Tier 2: how far rounding can take a kernel from the exact result."""

    final: Tensor
    """[N, HV] bound on the norm of the final state's error."""
    output: Tensor
    """[T, HV] bound on the norm of an output row's error."""


def _chunk_decay(log_decay: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T, H] largest sum of |g| over DECAY_STRETCH tokens of the sequence; -inf counts as 200."""
    size = torch.where(log_decay == -torch.inf, -200.0, log_decay).abs()
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    of_row = torch.repeat_interleave(torch.arange(len(lengths), device=size.device), lengths)
    token = torch.arange(len(of_row), device=size.device) - cu_seqlens[:-1][of_row]
    stretches = (lengths + DECAY_STRETCH - 1) // DECAY_STRETCH
    stretch = (stretches.cumsum(0) - stretches)[of_row] + token // DECAY_STRETCH
    sums = size.new_zeros(int(stretches.sum()), size.shape[1]).index_add_(0, stretch, size)
    largest = size.new_zeros(len(lengths), size.shape[1])
    index = torch.repeat_interleave(torch.arange(len(lengths), device=size.device), stretches)
    largest.scatter_reduce_(0, index[:, None].expand_as(sums), sums, "amax")
    per_token: Tensor = largest[of_row]
    return per_token


@dataclass(frozen=True)
class _Norms:
    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    start: Tensor


def _norms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor,
    l2norm: bool,
    l2norm_eps: float,
) -> _Norms:
    """Norms per token and value head in float64; KDA's decay per channel counts with its slowest one."""
    group = v.shape[1] // k.shape[1]

    def key_norm(x: Tensor) -> Tensor:
        size: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
        if l2norm:
            size = size / torch.sqrt(size * size + l2norm_eps)
        return size.repeat_interleave(group, dim=1)

    log_decay = g.double() if g.ndim == 2 else g.double().amax(-1)
    n_sequences = cu_seqlens.shape[0] - 1
    if initial_state is None:
        start = torch.zeros(n_sequences, v.shape[1], dtype=torch.float64, device=v.device)
    else:
        start = torch.linalg.vector_norm(initial_state.flatten(2), dim=-1, dtype=torch.float64)
    size_v = torch.linalg.vector_norm(v, dim=-1, dtype=torch.float64)
    return _Norms(key_norm(q), key_norm(k), size_v, log_decay.exp(), beta.double(), start)


def state_bounds(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor,
    l2norm: bool = False,
    l2norm_eps: float = 1e-6,
) -> StateBounds:
    """Tier 1 of the verdict: B_t, scale |q_t| B_t, and where they are a theorem.

    q, k [T, HK, K]; v [T, HV, V]; g [T, HV] or [T, HV, K] natural log; beta [T, HV]; any float dtype, finite
    (g = -inf is a reset and allowed). Returned tensors are float64.
    """
    size = _norms(q, k, v, g, beta, initial_state, cu_seqlens, l2norm, l2norm_eps)
    bound = scan(size.decay, size.beta.abs() * size.k * size.v, size.start, cu_seqlens)
    growth = size.beta * size.k * size.k
    stretches = (size.decay > 1) | (growth > 1 + UNIT_KEY_SLACK) | (size.beta < 0)
    none = torch.zeros_like(size.start)
    stretched = scan(torch.ones_like(bound), stretches.double(), none, cu_seqlens)
    return StateBounds(
        state=bound,
        final=last_of_each(bound, size.start, cu_seqlens),
        output=abs(scale) * size.q * bound,
        growth=growth,
        contracting=stretched == 0,
        final_contracting=last_of_each(stretched, none, cu_seqlens) == 0,
    )


class _Lost:
    """What underflow adds: absolute errors of entries that are too small for their format, by norm."""

    def __init__(self, roundoffs: Roundoffs, key_dim: int, value_dim: int) -> None:
        self.entry, self.output_entry = roundoffs.underflow, roundoffs.output_underflow
        self.key, self.value, self.row = key_dim**0.5, value_dim**0.5, DECAY_STRETCH**0.5
        self.stored_state = roundoffs.state_underflow * self.key * self.value

    def step(self, key: Tensor, residual: Tensor, written: Tensor) -> Tensor:
        """Per token: entries of u, v_new and v_decay; of w and k_beta exp(G); of a row of T; of the state."""
        operands = 3 * self.value * key + 2 * self.key * residual + self.row * (residual + written)
        underflow: Tensor = self.entry * operands + self.stored_state
        return underflow

    def output(self, reads: Tensor, written: Tensor) -> Tensor:
        """Per output row: the state and v_new as operands, a row of scores, the stored row."""
        operands = reads * self.value * (self.key + DECAY_STRETCH) + self.row * written
        underflow: Tensor = self.entry * operands + self.output_entry * self.value
        return underflow


def error_bounds(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    roundoffs: Roundoffs,
    initial_state: Tensor | None,
    cu_seqlens: Tensor,
    l2norm: bool = False,
    l2norm_eps: float = 1e-6,
) -> ErrorBounds:
    """Tier 2 of the verdict: e_t = a_t e_{t-1} + d_t, a bound on |S_t computed - S_t|_F.

    d_t holds the roundings of one step: the state's own (decay, update), the inner products', the dot
    operands' and the stored state's. |S_t| and the residual v - S^T k enter through their tier 1 bounds,
    so the result scales with (v, S) and needs no state trajectory; what underflows adds an absolute term.
    Shapes as in `state_bounds`.
    """
    size = _norms(q, k, v, g, beta, initial_state, cu_seqlens, l2norm, l2norm_eps)
    write = size.beta.abs() * size.k
    bound = scan(size.decay, write * size.v, size.start, cu_seqlens)
    residual = size.v + size.k * bound
    # A cumulative log decay G, kept in float32, is off by u |G|; so is every factor exp(G), relatively, and
    # by exp's own error besides (2^-22.5 for a GPU's ex2.approx).
    # The sum is taken of g itself: exp(g) is 0 below -745, and G has the whole of it.
    log_decay = g.double() if g.ndim == 2 else g.double().amax(-1)
    decays = DECAY_ROUNDINGS * roundoffs.accumulate * (1 + _chunk_decay(log_decay, cu_seqlens))
    spread = PROBABILISTIC_C * q.shape[-1] ** 0.5 * roundoffs.accumulate
    # A raw key is normalised by the kernel and rounded: one more operand rounding.
    operand = roundoffs.operand * (2.0 if l2norm else 1.0)
    step = (
        roundoffs.state * (2 * bound + 3 * write * residual)
        + spread * write * residual
        + operand * (bound / 2 + 3 * write * residual)
        + roundoffs.stored_state * bound
        + decays * (bound + write * residual)
    )
    # An operand of the call may be off by an ulp, two round-offs, also where nothing else happens to it.
    start = torch.zeros_like(size.start) + (2 * roundoffs.state + roundoffs.stored_state) * size.start
    # What passes through one chunk's products before it cancels: every write, not only what is left.
    written = scan(size.decay, write * residual, size.start, cu_seqlens)
    lost = _Lost(roundoffs, q.shape[-1], v.shape[-1])
    error = scan(
        size.decay, step + lost.step(size.k, residual, written), start + lost.stored_state, cu_seqlens
    )
    reads = abs(scale) * size.q
    output = reads * (
        error + (4 * operand + spread + decays) * (bound + written) + 2 * roundoffs.output * bound
    )
    output = output + lost.output(reads, abs(scale) * written)
    return ErrorBounds(final=last_of_each(error, start, cu_seqlens), output=output)
