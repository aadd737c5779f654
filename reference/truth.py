"""The truth: the recurrence's result at the chunk form's price.

The one idea: the chunk form is taken wherever `chunk_domain` proves it equal to the recurrence; every
other stretch, down to one (sequence, value head, chunk), takes the recurrence itself. A piece is first
tried whole; only rows that fail the test are done again, chunk by chunk.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .chunk import (
    PieceInputs,
    advance_piece,
    check_chunk_size,
    chunks_per_piece,
    few_launches,
    load_piece,
)
from .chunk_domain import Magnitudes, inputs_fit, magnitudes, states_fit
from .packing import Piece, check_rule, output_scale, pieces, scatter, sequence_bounds, starting_states
from .recurrence import step


def truth(
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
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The recurrence's output and final state. Arguments, shapes and errors as `recurrence.recurrence`.

    Chunks outside the domain of `chunk_domain` (non-finite or growing, say) take the recurrence token by
    token, so NaN and infinity reach exactly as far as its formula takes them: a NaN at token t leaves
    earlier tokens alone, 0 * inf is NaN, a gate of -inf resets a finite state.

    Memory beyond inputs and outputs is one piece (`chunk.PIECE_BYTES`), whatever T is.
    """
    bounds = sequence_bounds(cu_seqlens, q.shape[0] if q.dim() else 0)
    dims = check_rule(q, k, v, g, beta, initial_state, bounds)
    check_chunk_size(chunk_size)
    factor = output_scale(scale, dims.K)
    final = starting_states(initial_state, dims, q)
    output = torch.zeros((dims.n_tokens, dims.HV, dims.V), dtype=torch.float64, device=q.device)
    if dims.empty:
        return output, final
    for group in pieces(bounds, chunk_size, lambda rows: chunks_per_piece(dims, rows, q.device)):
        ids = group[0].ids.to(q.device)
        state = final[ids]
        for piece in group:
            x = load_piece(piece, q, k, v, g, beta, l2norm_eps if l2norm else None)
            scatter(true_piece(x, state[: len(piece.ids)], factor, piece), piece, output)
        final[ids] = state
    return output, final


def true_piece(x: PieceInputs, state: Tensor, scale: float, piece: Piece) -> Tensor:
    """Advance `state` [n, HV, K, V] in place through one piece; returns its output [M, HV, C, V]."""
    dead = set_aside_dead_columns(x, state)
    sizes = magnitudes(x)
    fit = inputs_fit(x, sizes, scale)
    # A GPU takes the chunk form on trust: asking first would keep it waiting; what does not fit is redone.
    if few_launches(x.v.device) or bool(fit.any(0).any()):
        before = state.clone()
        result = advance_piece(x, state, scale)
        output = result.output
        fit_here = fit & states_fit(sizes, result.h)
        if not bool(fit_here.all()):
            rows = torch.zeros(state.shape[:2], dtype=torch.bool, device=state.device)
            for here, count in zip(x.steps(), x.counts, strict=True):
                rows[:count] |= ~fit_here[here]
            state[rows] = before[rows]
            careful_rows(x, sizes, fit, state, scale, piece, rows, output)
    else:
        output = torch.empty_like(x.v)
        rows = torch.ones(state.shape[:2], dtype=torch.bool, device=state.device)
        careful_rows(x, sizes, fit, state, scale, piece, rows, output)
    if dead is not None:
        restore_dead_columns(x, state, output, dead)
    return output


def set_aside_dead_columns(x: PieceInputs, state: Tensor) -> Tensor | None:
    """Zero, in state and v, the columns [n, HV, V] of the state that are NaN throughout; None if none.

    Column c of a state meets column c of v and of the output and no other; once it is NaN in every row,
    S^T k and S^T q are NaN there for any k and q, so it stays so and reads so for ever.
    """
    if bool(state.sum().isfinite()):
        return None
    dead = state.isnan().all(-2)
    if not bool(dead.any()):
        return None
    state.masked_fill_(dead.unsqueeze(-2), 0.0)
    for here, count in zip(x.steps(), x.counts, strict=True):
        x.v[here].masked_fill_(dead[:count].unsqueeze(-2), 0.0)
    return dead


def restore_dead_columns(x: PieceInputs, state: Tensor, output: Tensor, dead: Tensor) -> None:
    """Put NaN back into the dead columns of the state and of every output."""
    state.masked_fill_(dead.unsqueeze(-2), math.nan)
    for here, count in zip(x.steps(), x.counts, strict=True):
        output[here].masked_fill_(dead[:count].unsqueeze(-2), math.nan)


def careful_rows(
    x: PieceInputs, sizes: Magnitudes, fit: Tensor, state: Tensor, scale: float, piece: Piece,
    rows: Tensor, output: Tensor,
) -> None:  # fmt: skip
    """Take rows (sequence, value head) of a piece chunk by chunk, each in the form that it is fit for.

    rows: [n, HV] bool; their states are advanced in place and their outputs [M, HV, C, V] written.
    """
    sequence, head = rows.nonzero(as_tuple=True)
    key_head = head // (x.v.shape[1] // x.k.shape[1])
    S = state[sequence, head].unsqueeze(1)
    order = sequence.cpu()  # ascending, so the rows still active at a step are a prefix
    for here, count in zip(x.steps(), x.counts, strict=True):
        n = int((order < count).sum())
        if n == 0:
            break
        chunk, h, hk = here.start + sequence[:n], head[:n], key_head[:n]
        one = PieceInputs(
            q=x.q[chunk, hk].unsqueeze(1),
            k=x.k[chunk, hk].unsqueeze(1),
            v=x.v[chunk, h].unsqueeze(1),
            g=x.g[chunk, h].unsqueeze(1),
            beta=x.beta[chunk, h].unsqueeze(1),
            counts=(n,),
        )
        lengths = piece.lengths[here.start + order[:n]]
        fit_now = fit[chunk, h] & states_fit(sizes.at(chunk, h), S[:n, 0])
        output[chunk, h] = careful_chunk(one, S[:n], scale, lengths, fit_now).squeeze(1)
    state[sequence, head] = S.squeeze(1)


def careful_chunk(x: PieceInputs, state: Tensor, scale: float, lengths: Tensor, fit: Tensor) -> Tensor:
    """One chunk of R rows of one head each: the chunk form where fit, else the recurrence.

    state: [R, 1, K, V], advanced in place; lengths: [R] tokens, never rising (CPU); fit: [R].
    Returns [R, 1, C, V].
    """
    dead = None
    if not bool(fit.all()):
        dead = set_aside_dead_columns(x, state)
        if dead is not None:
            sizes = magnitudes(x)
            fit = (inputs_fit(x, sizes, scale) & states_fit(sizes, state))[:, 0]
    output = torch.zeros_like(x.v)
    for chosen, fits in ((fit.nonzero().flatten(), True), ((~fit).nonzero().flatten(), False)):
        if not len(chosen):
            continue
        part = PieceInputs(
            q=x.q[chosen], k=x.k[chosen], v=x.v[chosen], g=x.g[chosen], beta=x.beta[chosen],
            counts=(len(chosen),),
        )  # fmt: skip
        own = state[chosen]
        if fits:
            output[chosen] = advance_piece(part, own, scale).output
        else:
            output[chosen] = recurrent_chunk(part, own, scale, lengths[chosen.cpu()])
        state[chosen] = own
    if dead is not None:
        restore_dead_columns(x, state, output, dead)
    return output


def recurrent_chunk(x: PieceInputs, state: Tensor, scale: float, lengths: Tensor) -> Tensor:
    """One chunk of R rows token by token; state [R, 1, K, V] in place; lengths [R] never rise."""
    S = state.squeeze(1)
    q, k, v, beta = (y.squeeze(1) for y in (x.q, x.k, x.v, x.beta.unsqueeze(-1)))
    decay = x.g.squeeze(1).exp()
    decay = decay if x.g.dim() == 4 else decay.unsqueeze(-1)
    output = torch.zeros_like(v)
    for t in range(int(lengths[0])):
        n = int((lengths > t).sum())
        output[:n, t] = step(S[:n], q[:n, t], k[:n, t], v[:n, t], decay[:n, t], beta[:n, t], scale)
    return output.unsqueeze(1)
