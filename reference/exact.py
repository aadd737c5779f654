"""Exact cases: is every number that a chunk algorithm forms representable where it is kept?

The idea: where the gates are 0 or a total reset and all else are small integers, nothing is rounded anywhere,
so a kernel must agree with the truth bit for bit. That is asserted, not assumed: each number of each
declared algorithm (substitution, blocks of 16, doubling; chunk sizes 16..128) is formed in float64 and
held against the format it is kept in, and each dot product's partial sums against float32's 24 bits
whatever the order of summation. What a wrong integer gives away is `exact_decode`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

CHUNK_SIZES = (16, 32, 64, 128)
BLOCK = 16
ACCUMULATOR = 2.0**24  # partial sums up to this many units are exact in float32
TF32_BITS = 11  # significant bits of a tf32 operand
RESET = -746.0  # exp of it is 0 in float64, float32 and below


@dataclass(frozen=True)
class ExactReport:
    """Whether a case is exact, and what is not."""

    exact: bool
    reason: str = ""
    """First number that is not representable: stage, algorithm, chunk size, sequence, chunk, head."""


class _Inexact(Exception):
    """Carries the stage and what is wrong with it."""


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
) -> ExactReport:
    """Decide in float64 whether no chunk algorithm rounds anything on this case.

    q, k: [T, HK, K] (raw with l2norm: then the norm must be exact in float32 too); v: [T, HV, V];
    g: [T, HV], natural log; beta: [T, HV]; initial_state: [N, HV, K, V].
    dtype: of operands and intermediates, None for v's own; state_dtype: of the stored state.
    """
    formats = _Formats(dtype or v.dtype, state_dtype)
    if g.dim() != 2:
        return ExactReport(False, "g is per key channel; only gates per head are decided")
    try:
        if l2norm:
            q, k = _normalise(q, "q"), _normalise(k, "k")
        _inputs(q, k, v, g, beta, scale, initial_state, formats)
        bounds = [0, len(v)] if cu_seqlens is None else [int(b) for b in cu_seqlens]
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
    """Walk one sequence chunk by chunk, heads as a batch."""
    q, k, v, g, beta = (x[span[0] : span[1]].double() for x in rule)
    group = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (q, k))
    v, g, beta = v.transpose(0, 1), g.T, beta.T
    zeros = torch.zeros(v.shape[0], k.shape[2], v.shape[2], dtype=torch.float64, device=v.device)
    current = zeros if state is None else state.double()
    for chunk, start in enumerate(range(0, v.shape[1], size)):
        part = slice(start, min(start + size, v.shape[1]))
        try:
            current = _chunk(q[:, part], k[:, part], v[:, part], g[:, part], beta[:, part], current, scale, f)
        except _Inexact as inexact:
            raise _Inexact(f"{inexact} (chunk size {size}, sequence {sequence}, chunk {chunk})") from None


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float, f: _Formats
) -> Tensor:
    """All stages of one chunk, [H, C, ...]; returns the state after it."""
    running = g.cumsum(1)
    _fits(running, torch.float32, "cumsum")
    decay = _decay(running.unsqueeze(2) - running.unsqueeze(1)).tril()
    from_start, to_end = _decay(running), _decay(running[:, -1:] - running)
    kk = _dot(k, k.mT, f, "kkt")
    a = (beta.unsqueeze(2) * kk * decay).tril(-1)
    solved = _solve(a, f)
    u = _kept(_dot(solved, v * beta.unsqueeze(2), f, "u"), f, "u")
    w = _kept(_dot(solved, k * (beta * from_start).unsqueeze(2), f, "w"), f, "w")
    _kept(state, f, "stored state")
    v_new = _kept(u - _dot(w, state, f, "w S"), f, "v_new")
    after = from_start[:, -1, None, None] * state
    after = after + _dot(k.mT * to_end.unsqueeze(1), v_new, f, "state")
    _fits(after, f.state, "state")
    qk = _kept(_dot(q, k.mT, f, "q k^T") * decay, f, "q k^T")
    output = _dot(q * from_start.unsqueeze(2), state, f, "q S") + _dot(qk, v_new, f, "output")
    _kept(output * scale, f, "output")
    return after


def _solve(a: Tensor, f: _Formats) -> Tensor:
    """(I + A)^-1 by the three algorithms; each must give the same integers without rounding."""
    size = a.shape[-1]
    eye = torch.eye(size, dtype=torch.float64, device=a.device)
    plain = _kept(torch.linalg.solve_triangular(a + eye, eye.expand_as(a), upper=False), f, "solve")
    if not torch.equal(plain @ (a + eye), eye.expand_as(a)):
        raise _Inexact("the inverse has no exact float64 form")
    _dot(a, plain, f, "substitution")
    for start in range(BLOCK, size, BLOCK):  # blocks: a new row of blocks against the inverse above it
        rows = slice(start, min(start + BLOCK, size))
        right = _kept(_dot(a[:, rows, :start], plain[:, :start, :start], f, "blocks"), f, "blocks")
        _dot(plain[:, rows, rows], right, f, "blocks")
    power, product, reach = a, eye - a, 2
    while reach < size:
        power = _kept(_dot(power, power, f, "doubling"), f, "powers of A (doubling)")
        product = _kept(product + _dot(product, power, f, "doubling"), f, "doubling")
        reach *= 2
    if not torch.equal(product, plain):
        raise _Inexact("doubling does not reach the inverse")
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
    if bool((a.abs() @ b.abs() > ACCUMULATOR).any()):
        raise _Inexact(f"{stage}: a partial sum passes 2^24")
    return a @ b


def _kept(x: Tensor, f: _Formats, stage: str) -> Tensor:
    _fits(x, f.operand, stage)
    return x


def _fits(x: Tensor, dtype: torch.dtype, stage: str) -> None:
    bad = x.to(dtype).double() != x
    if bool(bad.any()):
        value = float(x[bad][0])
        raise _Inexact(f"{stage}: {value:.17g} is not exact in {str(dtype).removeprefix('torch.')}")


def _tf32(x: Tensor, stage: str) -> None:
    mantissa = torch.frexp(x)[0] * 2.0**TF32_BITS
    if bool((mantissa != mantissa.round()).any()):
        raise _Inexact(f"{stage}: an operand is not exact in tf32")


def _integers(x: Tensor, name: str) -> None:
    bad = (x != x.round()) | ~torch.isfinite(x)
    if bool(bad.any()):
        raise _Inexact(f"{name} holds {float(x[bad][0]):g}, which is no integer")
