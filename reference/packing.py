"""Packed tensors: what is checked at the door, and how sequences are cut into pieces of chunks.

The one idea: sequences are sorted by length, so those that still run at step s are a prefix of the
group, and one piece (some steps of one group) is a flat list of chunks [M] in which every step is a
contiguous slice. Work and memory are then bounded by the piece, never by T. The arithmetic on a piece
is `chunk`'s; which form a chunk takes is `truth`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dims:
    """Sizes of one call; `channel` says that g decays each key channel by itself."""

    n_tokens: int
    n_sequences: int
    HK: int
    HV: int
    K: int
    V: int
    channel: bool

    @property
    def empty(self) -> bool:
        """Nothing to compute: every output is of size zero or a sum over nothing."""
        return 0 in (self.n_tokens, self.n_sequences, self.HV, self.K, self.V)


def sequence_bounds(cu_seqlens: Tensor | None, n_tokens: int) -> Tensor:
    """[N+1] int64 on the CPU; None is one sequence. Raises ValueError unless it rises from 0 to T."""
    if cu_seqlens is None:
        return torch.tensor([0, n_tokens])
    bounds = torch.as_tensor(cu_seqlens)
    if bounds.dim() != 1 or bounds.numel() == 0 or bounds.is_floating_point() or bounds.is_complex():
        raise ValueError(f"cu_seqlens must be [N+1] integers, got {bounds.dtype} {list(bounds.shape)}")
    bounds = bounds.detach().to("cpu", torch.int64)
    if int(bounds[0]) != 0 or int(bounds[-1]) != n_tokens:
        raise ValueError(
            f"cu_seqlens runs from {int(bounds[0])} to {int(bounds[-1])}; "
            f"it must run from 0 to T = {n_tokens}"
        )
    falls = (bounds.diff() < 0).nonzero().flatten()
    if len(falls):
        raise ValueError(f"cu_seqlens falls after entry {int(falls[0])}; it must never fall")
    return bounds


def check_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, bounds: Tensor
) -> Dims:
    """Shapes of one call of the rule against each other. Raises ValueError naming the tensor."""
    if q.dim() != 3 or v.dim() != 3:
        raise ValueError(f"q must be [T, HK, K] and v [T, HV, V], got {list(q.shape)} and {list(v.shape)}")
    n_tokens, HK, K = q.shape
    HV, V = v.shape[1:]
    channel = g.dim() == 3
    n_sequences = len(bounds) - 1
    expected: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "k": (k, (n_tokens, HK, K)),
        "v": (v, (n_tokens, HV, V)),
        "g": (g, (n_tokens, HV, K) if channel else (n_tokens, HV)),
        "beta": (beta, (n_tokens, HV)),
    }
    if initial_state is not None:
        expected["initial_state"] = (initial_state, (n_sequences, HV, K, V))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} must be {list(shape)} beside q {list(q.shape)}, got {list(tensor.shape)}"
            )
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} but q on {q.device}; put all on one device")
    if HV and (HK == 0 or HV % HK):
        raise ValueError(f"{HV} value heads cannot share {HK} key heads; HV must be a multiple of HK")
    return Dims(n_tokens, n_sequences, HK, HV, K, V, channel)


def starting_states(initial_state: Tensor | None, dims: Dims, like: Tensor) -> Tensor:
    """A fresh float64 [N, HV, K, V] to be advanced in place: the given states, or zeros."""
    shape = (dims.n_sequences, dims.HV, dims.K, dims.V)
    if initial_state is None:
        return torch.zeros(shape, dtype=torch.float64, device=like.device)
    return initial_state.detach().to(torch.float64, copy=True).contiguous()


def output_scale(scale: float | None, K: int) -> float:
    """The factor on the output: K**-0.5 where the call gives none."""
    return float(max(K, 1)) ** -0.5 if scale is None else float(scale)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (and at least 1)."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Piece:
    """Some steps of one group of sequences, as a flat list of M chunks, step by step."""

    ids: Tensor
    """[n] sequences of the group that are active at the piece's first step, longest first (CPU)."""
    counts: tuple[int, ...]
    """Active sequences at each step: a prefix of `ids`; they sum to M."""
    starts: Tensor
    """[M] first token of each chunk (CPU)."""
    lengths: Tensor
    """[M] tokens in each chunk, 1..chunk_size (CPU)."""
    first_step: int
    """Number of chunks of each sequence that came before this piece."""
    chunk_size: int
    rows: int
    """Rows that a chunk is padded to, a power of two."""

    @property
    def n_chunks(self) -> int:
        return len(self.starts)

    @property
    def padded(self) -> bool:
        return self.rows > self.chunk_size or bool((self.lengths < self.rows).any())

    @property
    def one_run(self) -> bool:
        """The chunks' tokens lie one after the other, whole chunks first."""
        return self.rows == self.chunk_size and self.counts[0] == 1

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Token of each row [M, rows], clamped where the row is padding, and which rows are real."""
        offset = torch.arange(self.rows)
        real = offset < self.lengths[:, None]
        token = self.starts[:, None] + torch.minimum(offset, self.lengths[:, None] - 1)
        return token.to(device), real.to(device)


def pieces(
    bounds: Tensor, chunk_size: int, chunks_that_fit: Callable[[int], int], fixed: bool = False
) -> Iterator[list[Piece]]:
    """The groups of sequences, each as its pieces in order; empty sequences are in none.

    chunks_that_fit(rows) is how many chunks of that many rows may be held at once. A group that is
    short throughout takes chunks as short as its longest sequence, so that decode steps cost no padding;
    `fixed` keeps chunk_size all the same.
    """
    lengths = bounds.diff()
    order = torch.argsort(lengths, descending=True, stable=True)
    order = order[: int((lengths > 0).sum())]
    while len(order):
        longest = int(lengths[order[0]])
        size = chunk_size if fixed else min(chunk_size, power_of_two(longest))
        rows = power_of_two(size)
        fit = max(1, chunks_that_fit(rows))
        ids, order = order[:fit], order[fit:]
        yield list(_pieces_of_group(bounds, lengths, ids, size, rows, fit))


def _pieces_of_group(
    bounds: Tensor, lengths: Tensor, ids: Tensor, size: int, rows: int, fit: int
) -> Iterator[Piece]:
    n_chunks = (lengths[ids] + size - 1) // size
    n_steps = int(n_chunks[0])
    active = (n_chunks[None, :] > torch.arange(n_steps)[:, None]).sum(1).tolist()
    step = 0
    while step < n_steps:
        stop, held = step + 1, active[step]
        while stop < n_steps and held + active[stop] <= fit:
            held += active[stop]
            stop += 1
        counts = active[step:stop]
        step_of = torch.repeat_interleave(torch.arange(step, stop), torch.tensor(counts))
        row_of = torch.cat([torch.arange(count) for count in counts])
        starts = bounds[ids[row_of]] + step_of * size
        left = bounds[ids[row_of] + 1] - starts
        yield Piece(ids[: counts[0]], tuple(counts), starts, left.clamp_max(size), step, size, rows)
        step = stop


def gather(x: Tensor, piece: Piece) -> Tensor:
    """x [T, H, ...] as float64 chunks [M, H, rows, ...], contiguous, zero in the padding."""
    M, rows = piece.n_chunks, piece.rows
    chunks = torch.empty((M, x.shape[1], rows, *x.shape[2:]), dtype=torch.float64, device=x.device)
    if piece.one_run:
        start, last = int(piece.starts[0]), int(piece.lengths[-1])
        whole = M if last == rows else M - 1
        body = x[start : start + whole * rows]
        chunks[:whole].copy_(body.view(whole, rows, *x.shape[1:]).transpose(1, 2))
        if whole < M:
            tail = x[start + whole * rows : start + whole * rows + last]
            chunks[whole, :, :last].copy_(tail.transpose(0, 1))
            chunks[whole, :, last:].zero_()
        return chunks
    token, real = piece.index(x.device)
    chunks.copy_(x[token].transpose(1, 2))
    return chunks if not piece.padded else clear_padding(chunks, real)


def clear_padding(chunks: Tensor, real: Tensor) -> Tensor:
    """Put zeros, in place, where a row of [M, H, rows, ...] is padding."""
    mask = ~real[:, None, :]
    return chunks.masked_fill_(mask.view(*mask.shape, *([1] * (chunks.dim() - 3))), 0.0)


def scatter(chunks: Tensor, piece: Piece, out: Tensor) -> None:
    """Write the real rows of [M, H, rows, ...] to their tokens of out [T, H, ...]."""
    rows = piece.rows
    by_token = chunks.transpose(1, 2)
    if piece.one_run:
        start, last = int(piece.starts[0]), int(piece.lengths[-1])
        whole = piece.n_chunks if last == rows else piece.n_chunks - 1
        out[start : start + whole * rows].view(whole, rows, *out.shape[1:]).copy_(by_token[:whole])
        if whole < piece.n_chunks:
            out[start + whole * rows : start + whole * rows + last].copy_(by_token[whole, :last])
        return
    token, real = piece.index(out.device)
    if piece.padded:
        out[token[real]] = by_token[real]
    else:
        out[token] = by_token
