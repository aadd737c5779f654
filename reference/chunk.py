"""The float64 chunk form: the recurrence's function, many tokens at a time.

The one idea: inside a chunk the writes u_t solve a unit lower triangular system, so one inverse and a
few matrix products replace C steps, and only the state is handed on from chunk to chunk
(shared design, section 3: cumsum, kkt, solve, wu, state, output). Exact in real arithmetic for any input;
in float64 it is the recurrence's result only where `truth` says so. `packing` cuts the sequences,
`decay` sums the gates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .decay import LARGEST_CHUNK, running_decay
from .l2norm import l2norm as normalise
from .packing import (
    Dims,
    Piece,
    check_rule,
    clear_padding,
    gather,
    output_scale,
    pieces,
    scatter,
    sequence_bounds,
    starting_states,
)

# Bytes that one piece may hold beside inputs and outputs: on a CPU little enough to stay near the
# caches, on a GPU enough for few and large launches, and an eighth of what is free at most.
PIECE_BYTES = {"cpu": 1 << 26, "cuda": 1 << 33}
GPU_SHARE = 8


@dataclass(frozen=True)
class ChunkResult:
    """Result of the chunk form; `stages` is empty unless asked for."""

    output: Tensor
    """[T, HV, V]"""
    final_state: Tensor
    """[N, HV, K, V]"""
    stages: dict[str, Tensor]
    """cumsum [T, HV] (or [T, HV, K]), kkt and solve [T, HV, C], w [T, HV, K], u and v_new [T, HV, V],
    h [n_chunks, HV, K, V], output [T, HV, V]; see `chunk_form`."""


@dataclass
class PieceInputs:
    """Float64 inputs of one piece of M chunks of C rows; padding rows are zero."""

    q: Tensor
    """[M, HK, C, K], as k"""
    k: Tensor
    v: Tensor
    """[M, HV, C, V]"""
    g: Tensor
    """[M, HV, C] or [M, HV, C, K]"""
    beta: Tensor
    """[M, HV, C]"""
    counts: tuple[int, ...]
    """Sequences at each step; they sum to M."""

    def steps(self) -> list[slice]:
        """The slice of the M chunks that each step owns."""
        ends = list(itertools.accumulate(self.counts))
        return [slice(end - count, end) for end, count in zip(ends, self.counts, strict=True)]


@dataclass
class PieceResult:
    """What the chunk form makes of a piece."""

    output: Tensor
    """[M, HV, C, V]"""
    h: Tensor
    """[M, HV, K, V], state at each chunk's start"""
    v_new: Tensor
    """[M, HV, C, V]"""
    A: Tensor
    """[M, HV, C, C]"""
    T: Tensor
    """[M, HV, C, C]"""
    from_start: Tensor
    """exp(G): [M, HV, C] or [M, HV, C, K]"""


def load_piece(
    piece: Piece, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, l2norm_eps: float | None
) -> PieceInputs:
    """Bring one piece's tokens into chunks, normalised where asked."""
    queries, keys = gather(q, piece), gather(k, piece)
    if l2norm_eps is not None:
        queries, keys = normalise(queries, l2norm_eps), normalise(keys, l2norm_eps)
        if l2norm_eps == 0.0 and piece.padded:
            real = piece.index(q.device)[1]
            queries, keys = clear_padding(queries, real), clear_padding(keys, real)
    return PieceInputs(queries, keys, gather(v, piece), gather(g, piece), gather(beta, piece), piece.counts)


def unit_lower_inverse(A: Tensor) -> Tensor:
    """(I + A)^-1 of strictly lower A [..., C, C], C a power of two, by doubling the inverted blocks.

    [[T1, 0], [-T2 A21 T1, T2]] is the inverse of [[I + A11, 0], [A21, I + A22]].
    """
    *lead, C, _ = A.shape
    flat = A.reshape(-1, C, C)
    T = flat.new_ones((flat.shape[0] * C, 1, 1))
    half = 1
    while half < C:
        n = C // (2 * half)
        blocks = flat.view(-1, n, 2 * half, n, 2 * half).diagonal(dim1=1, dim2=3).movedim(-1, 1)
        lower = blocks[..., half:, :half].reshape(-1, half, half)
        T = T.view(-1, 2, half, half)
        doubled = T.new_empty((T.shape[0], 2 * half, 2 * half))
        doubled[:, :half, :half] = T[:, 0]
        doubled[:, half:, half:] = T[:, 1]
        doubled[:, :half, half:] = 0.0
        corner = torch.bmm(torch.bmm(T[:, 1], lower), T[:, 0])
        torch.neg(corner, out=doubled[:, half:, :half])
        T = doubled
        half *= 2
    return T.view(*lead, C, C)


def advance_piece(x: PieceInputs, state: Tensor, scale: float) -> PieceResult:
    """Advance `state` [n, HV, K, V] in place through one piece, and compute its outputs.

    n is the number of sequences at the piece's first step; a sequence that ends earlier leaves its
    state as it then is.
    """
    M, HK, C, K = x.k.shape
    HV, V = x.v.shape[1], x.v.shape[3]
    heads = (M, HK, HV // HK)
    channel = x.g.dim() == 4
    decay = running_decay(x.g, channel)
    from_start, to_end = decay.from_start(), decay.to_end()
    k_heads, q_heads = (y.unsqueeze(2) for y in (x.k, x.q))
    if channel:
        k_each, q_each = (y.expand(*heads, C, K).reshape(M, HV, C, K) for y in (k_heads, q_heads))
        A, P = decay.pair_products(k_each, k_each), decay.pair_products(q_each, k_each)
    else:
        pairs = decay.pairs().view(*heads, C, C)
        A = (pairs * (x.k @ x.k.mT).unsqueeze(2)).view(M, HV, C, C)
        P = pairs.mul_((x.q @ x.k.mT).unsqueeze(2)).view(M, HV, C, C)
    A = A.mul_(x.beta.unsqueeze(-1)).tril_(-1)
    T = unit_lower_inverse(A)
    T_beta = (T * x.beta.unsqueeze(-2)).view(M * HV, C, C)

    def gated(y: Tensor, by: Tensor) -> Tensor:
        by = by if channel else by.unsqueeze(-1)
        return (y * by.view(*heads, C, -1)).view(M * HV, C, K)

    k_start, k_end, q_start = gated(k_heads, from_start), gated(k_heads, to_end), gated(q_heads, from_start)
    state_decay = from_start[:, :, -1].view(M * HV, -1, 1)
    h = state.new_empty((M * HV, K, V))
    v_new = torch.empty_like(x.v).view(M * HV, C, V)
    values, flat_state = x.v.view(M * HV, C, V), state.view(-1, K, V)
    if few_launches(state.device):
        _compose_states(x.counts, HV, values, k_start, k_end, T_beta, state_decay, flat_state, h, v_new)
    else:
        _pass_states(x.counts, HV, values, k_start, k_end, T_beta, state_decay, flat_state, h, v_new)
    output = torch.bmm(P.view(M * HV, C, C), v_new).baddbmm_(q_start, h, beta=scale, alpha=scale)
    return PieceResult(
        output.view(M, HV, C, V), h.view(M, HV, K, V), v_new.view(M, HV, C, V), A, T, from_start
    )


def _pass_states(
    counts: tuple[int, ...], HV: int, values: Tensor, k_start: Tensor, k_end: Tensor, T_beta: Tensor,
    state_decay: Tensor, state: Tensor, h: Tensor, v_new: Tensor,
) -> None:  # fmt: skip
    """The only loop over chunks: v_new = T beta (v - k exp(G) S), then the next state.

    All [rows, ...] with rows = chunks * HV in step order; state [n * HV, K, V] is advanced in place.
    """
    for here, target in _steps(counts, HV, state, h):
        error = torch.baddbmm(values[here], k_start[here], h[here], alpha=-1)
        torch.bmm(T_beta[here], error, out=v_new[here])
        torch.mul(h[here], state_decay[here], out=target)
        target.baddbmm_(k_end[here].mT, v_new[here])


def _steps(counts: tuple[int, ...], HV: int, state: Tensor, h: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """For each step its rows, and where the state after it goes: the next step's rows of h, or `state`.

    What was written there is the next step's state when the walk goes on.
    """
    at, n = 0, counts[0] * HV
    h[:n] = state[:n]
    for position, count in enumerate(counts):
        n = count * HV
        following = counts[position + 1] * HV if position + 1 < len(counts) else 0
        # Straight into the next step's slot where every sequence goes on.
        yield slice(at, at + n), h[at + n : at + 2 * n] if following == n else state[:n]
        at += n
        if following and following < n:
            h[at : at + following] = state[:following]


def few_launches(device: torch.device) -> bool:
    """Whether a launch costs more than the arithmetic that it would save."""
    return device.type == "cuda"


def _compose_states(
    counts: tuple[int, ...], HV: int, values: Tensor, k_start: Tensor, k_end: Tensor, T_beta: Tensor,
    state_decay: Tensor, state: Tensor, h: Tensor, v_new: Tensor,
) -> None:  # fmt: skip
    """`_pass_states` with one product per chunk in the loop, and more arithmetic outside of it.

    With u = T beta v and w = T beta k exp(G), the next state is M S + B, M = exp(G_last) - K^T w and
    B = K^T u with K = k exp(G_last - G); then v_new = u - w S for all chunks at once.
    """
    u, w = torch.bmm(T_beta, values), torch.bmm(T_beta, k_start)
    step = torch.bmm(k_end.mT, w).neg_()
    step.diagonal(dim1=1, dim2=2).add_(state_decay.squeeze(-1))
    written = torch.bmm(k_end.mT, u)
    for here, target in _steps(counts, HV, state, h):
        torch.baddbmm(written[here], step[here], h[here], out=target)
    torch.baddbmm(u, w, h, alpha=-1, out=v_new)


def piece_bytes_per_chunk(dims: Dims, rows: int) -> int:
    """Bytes that `advance_piece` holds at its peak for one chunk of `rows` rows, all heads."""
    per_head = 6 * rows * rows + 6 * rows * dims.K + 6 * rows * dims.V + (2 * dims.V + dims.K) * dims.K
    if dims.channel:
        per_head += 8 * rows * dims.K
    return 8 * max(1, dims.HV * per_head + 4 * dims.HK * rows * dims.K)


def chunks_per_piece(dims: Dims, rows: int, device: torch.device) -> int:
    """How many chunks of `rows` rows one piece may hold on this device."""
    budget = PIECE_BYTES.get(device.type, PIECE_BYTES["cpu"])
    if device.type == "cuda":
        budget = min(budget, torch.cuda.mem_get_info(device)[0] // GPU_SHARE)
    return max(1, budget // piece_bytes_per_chunk(dims, rows))


def check_chunk_size(chunk_size: int) -> None:
    """Raises ValueError unless 1 <= chunk_size <= 2048."""
    if not 1 <= chunk_size <= LARGEST_CHUNK:
        raise ValueError(f"chunk_size must be between 1 and {LARGEST_CHUNK}, got {chunk_size}")


def chunk_form(
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
    stages: bool = False,
) -> ChunkResult:
    """Run the rule chunk by chunk; chunks start anew with each sequence.

    Arguments, shapes and errors as `recurrence.recurrence`; chunk_size: 1..2048. With `stages`, also
    every stage's value by token, float64: cumsum is G, restarting in each chunk; kkt and solve are the
    rows of A and T = (I + A)^-1, columns beyond a short last chunk zero; u = T beta v,
    w = T beta k exp(G), v_new = u - w S; h the state at each chunk's start, sequence by sequence.
    Stages keep T rows of C entries; without them memory beyond inputs and outputs does not grow with T.
    """
    bounds = sequence_bounds(cu_seqlens, q.shape[0] if q.dim() else 0)
    dims = check_rule(q, k, v, g, beta, initial_state, bounds)
    check_chunk_size(chunk_size)
    factor = output_scale(scale, dims.K)
    final = starting_states(initial_state, dims, q)
    output = torch.zeros((dims.n_tokens, dims.HV, dims.V), dtype=torch.float64, device=q.device)
    kept = _empty_stages(dims, bounds, chunk_size, q.device) if stages else {}
    if dims.empty:
        return ChunkResult(output, final, {**kept, "output": output} if stages else {})
    # One chunk size for all groups where stages are kept: they are laid out by chunk.
    first_chunk = _chunk_offsets(bounds, chunk_size)
    for group in pieces(bounds, chunk_size, lambda rows: chunks_per_piece(dims, rows, q.device), stages):
        ids = group[0].ids.to(q.device)
        state = final[ids]
        for piece in group:
            x = load_piece(piece, q, k, v, g, beta, l2norm_eps if l2norm else None)
            result = advance_piece(x, state[: len(piece.ids)], factor)
            scatter(result.output, piece, output)
            if stages:
                _keep_stages(kept, piece, x, result, first_chunk)
        final[ids] = state
    return ChunkResult(output, final, {**kept, "output": output} if stages else {})


def _chunk_offsets(bounds: Tensor, chunk_size: int) -> Tensor:
    """[N+1]: number of chunks before each sequence (CPU)."""
    n_chunks = (bounds.diff() + chunk_size - 1) // chunk_size
    return torch.cat([torch.zeros(1, dtype=torch.int64), n_chunks.cumsum(0)])


def _empty_stages(dims: Dims, bounds: Tensor, C: int, device: torch.device) -> dict[str, Tensor]:
    T, HV, K, V = dims.n_tokens, dims.HV, dims.K, dims.V
    n_chunks = int(_chunk_offsets(bounds, C)[-1])
    shapes: dict[str, tuple[int, ...]] = {
        "cumsum": (T, HV, K) if dims.channel else (T, HV),
        "kkt": (T, HV, C),
        "solve": (T, HV, C),
        "w": (T, HV, K),
        "u": (T, HV, V),
        "h": (n_chunks, HV, K, V),
        "v_new": (T, HV, V),
    }
    return {name: torch.zeros(s, dtype=torch.float64, device=device) for name, s in shapes.items()}


def _keep_stages(
    kept: dict[str, Tensor], piece: Piece, x: PieceInputs, result: PieceResult, first_chunk: Tensor
) -> None:
    """Put one piece's stage values where they belong."""
    M, HK, C, K = x.k.shape
    HV = x.v.shape[1]
    along = 2
    scatter(x.g.cumsum(along), piece, kept["cumsum"])
    # Identity rows of the padding are not part of a short last chunk.
    size = piece.chunk_size
    scatter(result.A[..., :size], piece, kept["kkt"])
    real = piece.index(x.v.device)[1][:, None, None, :size]
    scatter(result.T[..., :size] * real, piece, kept["solve"])
    T_beta = result.T * x.beta.unsqueeze(-2)
    by = result.from_start if x.g.dim() == 4 else result.from_start.unsqueeze(-1)
    k_start = (x.k.unsqueeze(2) * by.view(M, HK, HV // HK, C, -1)).view(M, HV, C, K)
    scatter(T_beta @ x.v, piece, kept["u"])
    scatter(T_beta @ k_start, piece, kept["w"])
    scatter(result.v_new, piece, kept["v_new"])
    rows = torch.cat([piece.ids[:count] for count in piece.counts])
    step_of = torch.repeat_interleave(torch.arange(len(piece.counts)), torch.tensor(piece.counts))
    kept["h"][(first_chunk[rows] + piece.first_step + step_of).to(x.v.device)] = result.h
