"""The float64 recurrence of the gated delta rule: the definition of what is true.

The one idea: one token after the other, exactly in the order of the shared design's section 3 (decay,
error, write, read), so that NaN and infinity reach just as far as the formula takes them. Only
independent things are batched: heads, and sequences that have come equally far. `chunk` computes the
same function faster; `truth` says where it may.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .l2norm import l2norm as normalise
from .packing import check_rule, output_scale, sequence_bounds, starting_states

# Inputs of one block of steps, converted and laid out by step: at most this many float64 entries.
BLOCK_ENTRIES = 1 << 22


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, scale: float) -> Tensor:
    """Advance R independent states by one token, in place, and read them.

    S: [R, K, V] float64, changed. q, k: [R, K]; v: [R, V]; decay: [R, 1] or [R, K], linear;
    beta: [R, 1]. Returns o [R, V].
    """
    S.mul_(decay.unsqueeze(-1))
    u = beta * (v - torch.bmm(k.unsqueeze(1), S).squeeze(1))
    S.baddbmm_(k.unsqueeze(2), u.unsqueeze(1))
    return scale * torch.bmm(q.unsqueeze(1), S).squeeze(1)


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    l2norm: bool = False,
    l2norm_eps: float = 1e-6,
    return_states: bool = False,
) -> tuple[Tensor, ...]:
    """Run the rule token by token.

        S   <- exp(g_t) S;   u_t = beta_t (v_t - S^T k_t);   S <- S + k_t u_t^T;   o_t = scale S^T q_t

    q, k: [T, HK, K]; v: [T, HV, V], value head h reads key head h // (HV / HK); g: [T, HV] or
    [T, HV, K], natural log; beta: [T, HV]; initial_state: [N, HV, K, V], None is zeros; cu_seqlens:
    [N+1] int, None is one sequence; scale: None is K**-0.5; l2norm: normalise q and k first.
    Any dtype, one device. Returns float64 (output [T, HV, V], final_state [N, HV, K, V]), and with
    `return_states` also the state after each token [T, HV, K, V]. Raises ValueError for shapes or
    cu_seqlens that do not fit together.
    """
    bounds = sequence_bounds(cu_seqlens, q.shape[0] if q.dim() else 0)
    dims = check_rule(q, k, v, g, beta, initial_state, bounds)
    scale = output_scale(scale, dims.K)
    final = starting_states(initial_state, dims, q)
    output = torch.zeros((dims.n_tokens, dims.HV, dims.V), dtype=torch.float64, device=q.device)
    states = None
    if return_states:
        shape = (dims.n_tokens, dims.HV, dims.K, dims.V)
        states = torch.zeros(shape, dtype=torch.float64, device=q.device)
    if not dims.empty:
        _run(q, k, v, g, beta, scale, bounds, final, output, states, l2norm_eps if l2norm else None)
    return (output, final) if states is None else (output, final, states)


def _run(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, bounds: Tensor,
    final: Tensor, output: Tensor, states: Tensor | None, l2norm_eps: float | None,
) -> None:  # fmt: skip
    """Advance `final` [N, HV, K, V] through all tokens, filling output and states."""
    lengths = bounds.diff()
    order = torch.argsort(lengths, descending=True, stable=True)
    order = order[: int((lengths > 0).sum())]
    steps_of = lengths[order]
    ids = order.to(q.device)
    S = final[ids]
    HV, K, V = S.shape[1:]
    shared = HV // q.shape[1]
    at, n_steps = 0, int(steps_of[0])
    while at < n_steps:
        n = int((steps_of > at).sum())
        # A block ends where a sequence does, so that all its steps have the same n sequences.
        block = max(1, BLOCK_ENTRIES // (n * HV * (3 * K + V)))
        stop = min(at + block, int(steps_of[n - 1]))
        token = (bounds[order[:n]] + torch.arange(at, stop)[:, None]).to(q.device)  # [steps, n]
        # [steps, n * HV, ...]
        kq = [x[token].to(torch.float64) for x in (k, q)]
        if l2norm_eps is not None:
            kq = [normalise(x, l2norm_eps) for x in kq]
        keys, queries = (x.repeat_interleave(shared, 2).flatten(1, 2) for x in kq)
        values = v[token].to(torch.float64).flatten(1, 2)
        decay = g[token].to(torch.float64).flatten(1, 2).exp().view(stop - at, n * HV, -1)
        strength = beta[token].to(torch.float64).flatten(1, 2).unsqueeze(-1)
        rows = S[:n].view(n * HV, K, V)
        read = torch.empty_like(values)
        for t in range(stop - at):
            read[t] = step(rows, queries[t], keys[t], values[t], decay[t], strength[t], scale)
            if states is not None:
                states[token[t]] = S[:n]
        output[token] = read.view(stop - at, n, HV, V)
        at = stop
    final[ids] = S
