"""How far rounding can take a state that is decoded token by token.

Statement. With S the exact state and E the error's Frobenius norm, one token gives
E_t <= exp(g_t) E_{t-1} + d_t, because I - beta k k^T stretches nothing while beta |k|^2 <= 2. d_t is what the
token rounds: the stored state's round-off times |S_t|, and float32's for the decay, the two inner products
(6 sqrt(K) u, Higham & Mary's probabilistic constant, as in `reference.bounds`) and the update; the operand's
where q and k reach the kernel normalised and rounded. |S_t| is the exact one, so the bound is in units of the
state that there is, not of one that there could be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.bounds import DECAY_ROUNDINGS, PROBABILISTIC_C, scan
from ...reference.recurrence import recurrence
from ..inputs import Inputs, take_sequences
from ..yardstick import FAST_EXP_BIAS, RESET_LOG_DECAY, U32

# Tokens whose states are held at once: 64 of a layer's 32 heads of 128 x 128 in float64 are 270 MB.
BLOCK = 64
# Roundings of the update besides its inner products: residual, beta, product, sum.
UPDATE_ROUNDINGS = 4.0


def state_norms(inputs: Inputs) -> Tensor:
    """[T, HV] Frobenius norm of the exact state after every token. All sequences equally long."""
    n, length = inputs.n_sequences, int(inputs.cu_seqlens[1])
    everyone = list(range(n))
    norms = torch.zeros(inputs.n_tokens, inputs.heads, dtype=torch.float64, device=inputs.device)
    state = inputs.initial_state
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        part = take_sequences(inputs, everyone, skip=[start] * n, tokens=[stop] * n)
        keywords = {**part.keywords(), "initial_state": state}
        _, state, states = recurrence(**keywords, return_states=True)
        rows = (inputs.cu_seqlens[:-1, None] + torch.arange(start, stop, device=inputs.device)).flatten()
        norms[rows] = states.flatten(2).norm(dim=-1)
    return norms


def drift_bounds(inputs: Inputs, norms: Tensor, *, stored: float, operand: float) -> Tensor:
    """[T, HV] bound on the norm of the state's error after every token; inf where a token may stretch it.

    norms: of `state_norms`. stored: unit round-off of the state between tokens (0: kept in registers);
    operand: of the keys that reach the kernel.
    """
    group = inputs.heads // inputs.k.shape[1]
    key = torch.linalg.vector_norm(inputs.k, dim=-1, dtype=torch.float64)
    if inputs.l2norm:
        key = key / torch.sqrt(key * key + inputs.l2norm_eps)
    key = key.repeat_interleave(group, dim=1)
    value = torch.linalg.vector_norm(inputs.v, dim=-1, dtype=torch.float64)
    g = inputs.g.double() if inputs.g.ndim == 2 else inputs.g.double().amax(-1)
    g = torch.where(g == -torch.inf, RESET_LOG_DECAY, g)
    beta = inputs.beta.double().abs()
    before = torch.zeros_like(norms)
    before[1:] = norms[:-1]
    start = torch.zeros(inputs.n_sequences, inputs.heads, dtype=torch.float64, device=inputs.device)
    if inputs.initial_state is not None:
        start = torch.linalg.vector_norm(inputs.initial_state.flatten(2), dim=-1, dtype=torch.float64)
    before[inputs.cu_seqlens[:-1]] = start
    decayed = g.exp() * before
    residual = value + key * decayed
    products = PROBABILISTIC_C * inputs.q.shape[-1] ** 0.5
    step = stored * norms + U32 * (
        (DECAY_ROUNDINGS * (1 + g.abs()) + FAST_EXP_BIAS / U32) * decayed
        + norms
        + beta * key * (products + UPDATE_ROUNDINGS) * residual
    )
    # A key that is off by its round-off enters twice: in what is read and in what is written.
    step = step + 2 * operand * beta * key * (residual + key * decayed)
    stretches = (g > 0) | (beta * key * key > 2) | (inputs.beta < 0)
    step = torch.where(stretches, torch.inf, step)
    bound = scan(g.exp(), torch.nan_to_num(step, posinf=0.0), (stored + U32) * start, inputs.cu_seqlens)
    ever = scan(torch.ones_like(bound), stretches.double(), torch.zeros_like(start), inputs.cu_seqlens)
    return torch.where(ever > 0, torch.inf, bound)
