"""Exact cases: is every number that a chunk algorithm forms representable where it is kept?

The idea: where the gates are 0 or a total reset and all else are small integers, nothing is rounded anywhere,
so a kernel must agree with the truth bit for bit. That is asserted, not assumed: each number of each
declared algorithm (substitution, blocks of 16, doubling; chunk sizes 16..128) is formed in float64 and
held against the format it is kept in, and each dot product's partial sums against float32's 24 bits
whatever the order of summation. Long cases of one-hot keys are proven instead (`exact_one_hot`). What a
wrong integer gives away is `exact_decode`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .exact_one_hot import is_proven

CHUNK_SIZES = (16, 32, 64, 128)
BLOCK = 16
ACCUMULATOR = 2.0**24  # partial sums up to this many units are exact in float32
TF32_BITS = 11  # significant bits of a tf32 operand
# Entries of one tensor of a piece of chunks, on a CPU and on a GPU: near the caches, and few large launches.
PIECE_ENTRIES = (1 << 19, 1 << 25)
RESET = -746.0  # exp of it is 0 in float64, float32 and below


@dataclass(frozen=True)
class ExactReport:
    """Whether a case is exact, and what is not."""

    exact: bool
    reason: str = ""
    """First number that is not representable: stage, algorithm, chunk size, sequence, chunk, head."""


class _Inexact(Exception):
    """Carries the stage, what is wrong with it and, where it is one of several, the chunk."""

    def __init__(self, text: str, chunk: int | None = None) -> None:
        super().__init__(text)
        self.chunk = chunk


@dataclass(frozen=True)
class _Formats:
    operand: torch.dtype
    state: torch.dtype


def is_exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype | None = None,
    state_dtype: torch.dtype = torch.float32,
    chunk_sizes: tuple[int, ...] = CHUNK_SIZES,
    l2norm: bool = False,
    walk: bool = False,
) -> ExactReport:
    """Decide in float64 whether no chunk algorithm rounds anything on this case.

    q, k: [T, HK, K] (raw with l2norm: then the norm must be exact in float32 too); v: [T, HV, V];
    g: [T, HV], natural log; beta: [T, HV]; initial_state: [N, HV, K, V].
    dtype: of operands and intermediates, None for v's own; state_dtype: of the stored state.
    walk: form every number also where `exact_one_hot` proves that none is rounded.
    """
    formats = _Formats(dtype or v.dtype, state_dtype)
    if g.dim() != 2:
        return ExactReport(False, "g is per key channel; only gates per head are decided")
    try:
        if l2norm:
            q, k = _normalise(q, "q"), _normalise(k, "k")
        _inputs(q, k, v, g, beta, scale, initial_state, formats)
        bounds = [0, len(v)] if cu_seqlens is None else [int(b) for b in cu_seqlens]
        if not walk and is_proven(
            q, k, v, g, beta, scale=scale, initial_state=initial_state, bounds=bounds, dtype=formats.operand,
            state_dtype=state_dtype, largest_chunk=max(chunk_sizes),
        ):  # fmt: skip
            return ExactReport(True)
        for size in chunk_sizes:
            for sequence, (start, end) in enumerate(pairwise(bounds)):
                state = None if initial_state is None else initial_state[sequence]
                _sequence((q, k, v, g, beta), (start, end), size, scale, state, formats, sequence)
    except _Inexact as inexact:
        return ExactReport(False, str(inexact))
    return ExactReport(True)


def _normalise(x: Tensor, name: str) -> Tensor:
    """Unit rows by l2norm in float32; every step must be exact and give 0, 1 or -1."""
    y = x.float()
    norm = torch.sqrt((y * y).sum(-1, keepdim=True) + 1e-6)
    unit = y / norm
    reciprocal = y * (1.0 / norm)
    if not bool(((unit == 0) | (unit.abs() == 1)).all()) or not torch.equal(unit, reciprocal):
        raise _Inexact(f"l2norm of {name} is not exactly 0, 1 or -1 in float32")
    return unit


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, state: Tensor | None, f: _Formats
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v), ("beta", beta)):
        _fits(x.double(), f.operand, name)
        _integers(x.double(), name)
    if state is not None:
        _integers(state.double(), "initial_state")
        _fits(state.double(), f.state, "initial_state")
    mantissa = abs(torch.frexp(torch.tensor(scale, dtype=torch.float64))[0].item())
    if mantissa != 0.5:
        raise _Inexact(f"scale {scale:g} is no power of two")
    if bool((~((g == 0) | (g <= RESET)) | ~torch.isfinite(g)).any()):
        raise _Inexact("a gate is neither 0 nor a finite total reset (-746 or less)")


def _sequence(
    rule: tuple[Tensor, ...],
    span: tuple[int, int],
    size: int,
    scale: float,
    state: Tensor | None,
    f: _Formats,
    sequence: int,
) -> None:
    """Form every number of one sequence, some chunks at a time; only the states are walked one by one.

    Rows that fill the last chunk up are zero, which no sum and no inverse sees.
    """
    n_tokens = span[1] - span[0]
    heads, (K, V) = rule[2].shape[1], (rule[1].shape[2], rule[2].shape[2])
    current = torch.zeros(heads, K, V, dtype=torch.float64, device=rule[2].device)
    if state is not None:
        current = state.double()
    at_once = max(1, PIECE_ENTRIES[current.device.type != "cpu"] // (heads * size * max(size, K, V)))
    for first in range(0, -(-n_tokens // size), at_once):
        rows = slice(span[0] + first * size, min(span[0] + (first + at_once) * size, span[1]))
        q, k, v, g, beta = (_chunked(x[rows], heads, size) for x in rule)
        try:
            current = _chunks(q, k, v, g.squeeze(-1), beta.squeeze(-1), current, scale, f)
        except _Inexact as inexact:
            place = "" if inexact.chunk is None else f", chunk {first + inexact.chunk}"
            raise _Inexact(f"{inexact} (chunk size {size}, sequence {sequence}{place})") from None


def _chunked(x: Tensor, heads: int, size: int) -> Tensor:
    """[T, HK or HV, ...] -> [M, HV, size, ...] float64; a value head reads key head h // (HV / HK)."""
    x = x.double().reshape(*x.shape[:2], -1)
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -len(x) % size))
    x = x.view(-1, size, *x.shape[1:]).transpose(1, 2)
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float, f: _Formats
) -> Tensor:
    """All stages of M successive chunks, [M, H, C, ...]; returns the state [H, K, V] after the last."""
    running = g.cumsum(2)
    _fits(running, torch.float32, "cumsum")
    decay = _decay(running.unsqueeze(3) - running.unsqueeze(2)).tril_()
    from_start, to_end = _decay(running), _decay(running[..., -1:] - running)
    kk = _dot(k, k.mT, f, "kkt")
    a = (beta.unsqueeze(3) * kk).mul_(decay).tril_(-1)
    solved = _solve(a, f)
    u = _kept(_dot(solved, v * beta.unsqueeze(3), f, "u"), f, "u")
    w = _kept(_dot(solved, k * (beta * from_start).unsqueeze(3), f, "w"), f, "w")
    k_end = (k * to_end.unsqueeze(3)).mT
    h = _states(u, w, k_end, from_start[..., -1, None, None], state)
    before, after = h[:-1], h[1:]
    _kept(before, f, "stored state")
    v_new = _kept(u - _dot(w, before, f, "w S"), f, "v_new")
    _dot(k_end, v_new, f, "state")
    _fits(after, f.state, "state")
    qk = _kept(_dot(q, k.mT, f, "q k^T").mul_(decay), f, "q k^T")
    output = _dot(q * from_start.unsqueeze(3), before, f, "q S") + _dot(qk, v_new, f, "output")
    _kept(output * scale, f, "output")
    return after[-1]


def _states(u: Tensor, w: Tensor, k_end: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """[M + 1, H, K, V]: the state before each chunk and after the last, in float64; judged by the caller."""
    h = state.new_empty(len(u) + 1, *state.shape)
    h[0] = state
    for chunk in range(len(u)):
        v_new = torch.baddbmm(u[chunk], w[chunk], h[chunk], alpha=-1)
        torch.mul(h[chunk], decay[chunk], out=h[chunk + 1])
        h[chunk + 1].baddbmm_(k_end[chunk], v_new)
    return h


def _solve(a: Tensor, f: _Formats) -> Tensor:
    """(I + A)^-1 by the three algorithms; each must give the same integers without rounding."""
    size = a.shape[-1]
    eye = torch.eye(size, dtype=torch.float64, device=a.device)
    plain = _kept(torch.linalg.solve_triangular(a + eye, eye.expand_as(a), upper=False), f, "solve")
    _same(_product(plain, a + eye), eye, "the inverse has no exact float64 form")
    _dot(a, plain, f, "substitution")
    for start in range(BLOCK, size, BLOCK):  # blocks: a new row of blocks against the inverse above it
        rows = slice(start, min(start + BLOCK, size))
        right = _kept(_dot(a[..., rows, :start], plain[..., :start, :start], f, "blocks"), f, "blocks")
        _dot(plain[..., rows, rows], right, f, "blocks")
    power, product, reach = a, eye - a, 2
    while reach < size:
        power = _kept(_dot(power, power, f, "doubling"), f, "powers of A (doubling)")
        product = _kept(product + _dot(product, power, f, "doubling"), f, "doubling")
        reach *= 2
    _same(product, plain, "doubling does not reach the inverse")
    return plain


def _decay(log_decay: Tensor) -> Tensor:
    """exp of 0 and of total resets; above the diagonal (positive) the entry is masked by the caller."""
    return (log_decay >= 0).double()


def _dot(a: Tensor, b: Tensor, f: _Formats, stage: str) -> Tensor:
    """a @ b, with operands that fit their format and partial sums that fit float32 in any order."""
    for operand in (a, b):
        _fits(operand, f.operand, f"operand of {stage}")
        if f.operand == torch.float32:
            _tf32(operand, stage)
    _refuse(_product(a.abs(), b.abs()) > ACCUMULATOR, f"{stage}: a partial sum passes 2^24")
    return _product(a, b)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b. On a CPU in float32, twice as fast: integers whose sums of magnitudes pass no 2^24 are exact in
    it, and a sum that does pass still shows as one that does."""
    if a.device.type != "cpu":
        return a @ b
    return (a.float() @ b.float()).double()


def _kept(x: Tensor, f: _Formats, stage: str) -> Tensor:
    _fits(x, f.operand, stage)
    return x


def _same(x: Tensor, wanted: Tensor, text: str) -> None:
    _refuse(x != wanted, text)


def _refuse(bad: Tensor, text: str) -> None:
    """Raise _Inexact where any entry of bad [M, ...] is true, naming the first chunk that has one."""
    if bool(bad.any()):
        raise _Inexact(text, _first_chunk(bad))


def _first_chunk(bad: Tensor) -> int | None:
    return int(bad.flatten(1).any(1).nonzero()[0]) if bad.dim() >= 3 else None


def _fits(x: Tensor, dtype: torch.dtype, stage: str) -> None:
    bad = x.to(dtype) != x
    if bool(bad.any()):
        name = str(dtype).removeprefix("torch.")
        raise _Inexact(f"{stage}: {float(x[bad][0]):.17g} is not exact in {name}", _first_chunk(bad))


def _tf32(x: Tensor, stage: str) -> None:
    mantissa = torch.frexp(x)[0] * 2.0**TF32_BITS
    if bool((mantissa != mantissa.round()).any()):
        raise _Inexact(f"{stage}: an operand is not exact in tf32")


def _integers(x: Tensor, name: str) -> None:
    bad = (x != x.round()) | ~torch.isfinite(x)
    if bool(bad.any()):
        raise _Inexact(f"{name} holds {float(x[bad][0]):g}, which is no integer")
