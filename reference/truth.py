"""The truth: the recurrence's result at the chunk form's price.

The one idea: the chunk form is taken only where a bound proves it equal to the recurrence; every other
stretch, down to one (sequence, value head, chunk), takes the recurrence itself. See `truth` for the
conditions and `provable` for their test.
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
    load_piece,
)
from .packing import (
    Piece,
    check_rule,
    output_scale,
    pieces,
    scatter,
    sequence_bounds,
    starting_states,
)
from .recurrence import step

# Magnitudes that leave every product of the chunk form below 1e300 (see `truth`).
LARGEST_FACTOR = 1e25
LARGEST_CONTENT = 1e100
# How much a chunk may amplify a perturbation of its state: beyond 2 = exact reflections, rounded keys.
LARGEST_GROWTH = math.log(16.0)
# How far a state may stand above what its chunk writes before erasing it would cost digits.
LARGEST_RANGE = 1e3


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

    A chunk of one value head takes the chunk form if, with S its state at the start:

    1. q, k, v, g, beta and S are finite, g = -inf excepted. A column of S that is NaN throughout stays
       so for ever and touches no other: it is set aside and counts as fine.
    2. g <= 0 and beta >= 0, and the product over the chunk of max(1, exp(g_t) |1 - beta_t |k_t|^2|) is at
       most 16. Then no step expands a state much: beta |k|^2 <= 2 does not expand at all.
    3. |q|, |k|, beta, scale <= 1e25 and |v|, |S| <= 1e100, entry by entry.
    4. max|S| max|k| <= 1000 max|v|, unless the chunk's writes together erase less than a factor 1000.

    Why this is enough. By 2, with B_t = exp(g_t) B_{t-1} + beta_t |k_t| |v_t| and B_0 = |S|_F, |S_t| <= 16 B_t;
    every column of T is a run of the same recurrence, so |T_ij| <= 16 beta_i |k_i| |k_j| and the writes are
    at most beta_t (|v_t| + 16 |k_t| B_t). With 3 all products stay below 1e300: nothing overflows, and
    underflow is below 1e-300 of the factors. Each rounding in the chunk form is then a perturbation of one
    write by at most some C eps of its bound, which later steps do not amplify (2): the two forms differ
    by O(C^2 eps) B_t. 4 keeps B_t within a constant of what the chunk itself holds; without it a large
    state that is overwritten by a small one would leave its rounding behind. Decay between tokens is
    computed without cancellation (`decay`), and exp(g) = 0 with a finite S is a reset in both forms.

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
    fit = fit_for_chunks(x, scale)
    rows = torch.ones(state.shape[:2], dtype=torch.bool, device=state.device)
    output = torch.empty_like(x.v)
    if bool(fit.all(0).any()):
        before = state.clone()
        result = advance_piece(x, state, scale)
        fit_here = fit & state_is_fit(x, result.h)
        output = result.output
        rows = torch.zeros_like(rows)
        for step_slice, count in zip(steps_of(x), x.counts, strict=True):
            rows[:count] |= ~fit_here[step_slice]
        if bool(rows.any()):
            state[rows] = before[rows]
    if bool(rows.any()):
        careful_rows(x, state, scale, piece, fit, rows, output)
    if dead is not None:
        restore_dead_columns(x, state, output, dead)
    return output


def steps_of(x: PieceInputs) -> list[slice]:
    """The slice of the M chunks that each step owns."""
    ends = torch.tensor(x.counts).cumsum(0).tolist()
    return [slice(end - count, end) for end, count in zip(ends, x.counts, strict=True)]


def set_aside_dead_columns(x: PieceInputs, state: Tensor) -> Tensor | None:
    """Zero, in state and v, the columns [n, HV, V] of the state that are NaN throughout; None if none."""
    dead = state.isnan().all(-2)
    if not bool(dead.any()):
        return None
    state.masked_fill_(dead.unsqueeze(-2), 0.0)
    for here, count in zip(steps_of(x), x.counts, strict=True):
        x.v[here].masked_fill_(dead[:count].unsqueeze(-2), 0.0)
    return dead


def restore_dead_columns(x: PieceInputs, state: Tensor, output: Tensor, dead: Tensor) -> None:
    """Put NaN back into the dead columns of the state and of every output (NaN * anything is NaN)."""
    state.masked_fill_(dead.unsqueeze(-2), math.nan)
    for here, count in zip(steps_of(x), x.counts, strict=True):
        output[here].masked_fill_(dead[:count].unsqueeze(-2), math.nan)


def per_head_norms(x: PieceInputs) -> tuple[Tensor, Tensor]:
    """beta |k|^2 [M, HV, C] and the largest |k| of each chunk [M, HV]."""
    shared = x.v.shape[1] // x.k.shape[1]
    squares = x.k.square().sum(-1)
    if shared > 1:
        squares = squares.repeat_interleave(shared, 1)
    return x.beta * squares, squares.amax(-1).sqrt()


def fit_for_chunks(x: PieceInputs, scale: float) -> Tensor:
    """Conditions 1 to 3 of `truth`, as far as the inputs decide them: [M, HV]. NaN fails every one."""
    shared = x.v.shape[1] // x.k.shape[1]
    strength, _ = per_head_norms(x)
    g = x.g.amax(-1) if x.g.dim() == 4 else x.g
    growth = (g + (strength - 1.0).clamp_min(1e-300).log()).clamp_min(0.0).sum(-1)
    keys = (x.k.abs().amax((-1, -2)) <= LARGEST_FACTOR) & (x.q.abs().amax((-1, -2)) <= LARGEST_FACTOR)
    fit = keys.repeat_interleave(shared, 1) & (growth <= LARGEST_GROWTH)
    fit &= (g.amax(-1) <= 0.0) & (x.beta.amin(-1) >= 0.0) & (x.beta.amax(-1) <= LARGEST_FACTOR)
    fit &= x.v.abs().amax((-1, -2)) <= LARGEST_CONTENT
    return fit if abs(scale) <= LARGEST_FACTOR else torch.zeros_like(fit)


def state_is_fit(x: PieceInputs, h: Tensor) -> Tensor:
    """Conditions 1, 3 and 4 of `truth` on the states at the chunks' starts, h [M, HV, K, V]: [M, HV]."""
    strength, key = per_head_norms(x)
    largest = h.abs().amax((-1, -2))
    content = x.v.abs().amax((-1, -2))
    erased = (1.0 - strength).abs().log().neg_().clamp_min(0.0).sum(-1)
    in_range = (largest * key <= LARGEST_RANGE * content) | (erased <= math.log(LARGEST_RANGE))
    return (largest <= LARGEST_CONTENT) & in_range


def careful_rows(
    x: PieceInputs, state: Tensor, scale: float, piece: Piece, fit: Tensor, rows: Tensor, output: Tensor
) -> None:
    """Take the rows (sequence, value head) of a piece chunk by chunk, each in the form that it is fit for.

    rows: [n, HV] bool; their states are advanced in place and their outputs [M, HV, C, V] written.
    """
    sequence, head = rows.nonzero(as_tuple=True)
    key_head = head // (x.v.shape[1] // x.k.shape[1])
    S = state[sequence, head]
    order = sequence.tolist()  # ascending, so the rows still active at a step are a prefix
    for here, count in zip(steps_of(x), x.counts, strict=True):
        n = sum(1 for i in order if i < count)
        if n == 0:
            break
        chunk, h = here.start + sequence[:n], head[:n]
        one = PieceInputs(
            x.q[chunk, key_head[:n]].unsqueeze(1),
            x.k[chunk, key_head[:n]].unsqueeze(1),
            x.v[chunk, h].unsqueeze(1),
            x.g[chunk, h].unsqueeze(1),
            x.beta[chunk, h].unsqueeze(1),
            (n,),
        )
        lengths = piece.lengths[here.start + torch.tensor(order[:n])]
        output[chunk, h] = careful_chunk(one, S[:n], scale, lengths, fit[chunk, h])
    state[sequence, head] = S


def careful_chunk(x: PieceInputs, S: Tensor, scale: float, lengths: Tensor, fit: Tensor) -> Tensor:
    """One chunk of R rows, heads apart: the chunk form where fit, else the recurrence.

    S: [R, K, V], advanced in place; lengths: [R] tokens, never rising (CPU); fit: [R] by the inputs.
    Returns [R, C, V], zero in the padding of the recurrence's rows.
    """
    states = S.unsqueeze(1)
    dead = set_aside_dead_columns(x, states)
    fit = fit_for_chunks(x, scale)[:, 0] if dead is not None else fit
    fit = fit & state_is_fit(x, states)[:, 0]
    output = torch.zeros_like(x.v)
    for which, run in ((fit, True), (~fit, False)):
        chosen = which.nonzero().flatten()
        if not len(chosen):
            continue
        part = PieceInputs(
            *(y[chosen] for y in (x.q, x.k, x.v, x.g, x.beta)),
            counts=(len(chosen),),
        )
        own = states[chosen]
        if run:
            output[chosen] = advance_piece(part, own, scale).output
        else:
            output[chosen] = recurrent_chunk(part, own, scale, lengths[chosen.cpu()])
        states[chosen] = own
    if dead is not None:
        restore_dead_columns(x, states, output, dead)
    return output.squeeze(1)


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
