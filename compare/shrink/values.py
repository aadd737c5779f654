"""Simpler values: zero, one, a unit vector, a power of two, few distinct ones.

The idea: what is left of a tensor when its plain parts are plain shows what the fault needs. Every tensor has
its plainest sound value (a zero v, a decay of one, a beta of one, keys that are unit vectors), tried for the
whole tensor, then for ever smaller blocks of tokens; what must stay is rounded to fewer bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .candidate import VALUED, Candidate
from .structure import Box, Candidates, _halving

Change = tuple[str, Tensor]
BITS = (0, 1, 2, 4)
# Blocks of tokens of one tensor that are tried in one round.
MOST_BLOCKS = 64


def plain_values(name: str, x: Tensor, linear_gate: bool) -> Iterator[Change]:
    """Values to try in place of a tensor's own, the plainest first: (in words, a tensor of its shape)."""
    if name in ("initial_state", "pool", "v"):
        yield "0", torch.zeros_like(x)
        yield "1", torch.ones_like(x)
    if name == "q":
        yield "0", torch.zeros_like(x)
    if name in ("q", "k"):
        yield "the first unit vector", _unit_vectors(x, turning=False)
        yield "unit vectors in turn", _unit_vectors(x, turning=True)
    if name == "beta":
        yield "1", torch.ones_like(x)
        yield "0.5", torch.full_like(x, 0.5)
    if name == "g":
        yield "no decay", torch.ones_like(x) if linear_gate else torch.zeros_like(x)
    if x.numel():
        middle = x.float().median()
        if bool(torch.isfinite(middle)):
            if name in ("g", "beta"):
                yield f"{float(middle):.4g} everywhere", torch.full_like(x, float(middle))
                largest = x.float().abs().max()
                if bool(torch.isfinite(largest)) and name == "beta":
                    yield f"{float(largest):.4g} everywhere", torch.full_like(x, float(largest))
            for bits in BITS:
                yield f"{bits + 1} bit(s)", rounded(x, bits, below_one=name in ("g", "beta") or linear_gate)


def _unit_vectors(x: Tensor, *, turning: bool) -> Tensor:
    """[T, H, K]: e_0 in every row, or e_(t mod K) in row t."""
    plain = torch.zeros_like(x)
    at = torch.arange(x.shape[0]) % x.shape[-1] if turning else torch.zeros(x.shape[0], dtype=torch.int64)
    plain[torch.arange(x.shape[0]), :, at] = 1.0
    return plain


def rounded(x: Tensor, bits: int, *, below_one: bool = False) -> Tensor:
    """x with so many bits behind the leading one; below_one: towards zero, so that a beta of 0.99 stays
    below 1."""
    wide = x.double()
    mantissa, exponent = torch.frexp(torch.where(torch.isfinite(wide), wide, torch.zeros_like(wide)))
    scaled = mantissa * 2.0 ** (bits + 1)
    kept = torch.trunc(scaled) if below_one else torch.round(scaled)
    result = torch.ldexp(kept * 2.0 ** -(bits + 1), exponent)
    return torch.where(torch.isfinite(wide), result, wide).to(x.dtype)


def whole(box: Box) -> Candidates:
    """Every tensor's plain values, in place of the whole tensor."""
    for name in VALUED:
        x = box.best.case.get(name)
        if x is None:
            continue
        for words, plain in plain_values(name, x, box.best.case.options.gate_space == "linear"):
            candidate = _replaced(box.best, name, plain, f"{name}: {words}")
            if candidate is None:
                continue
            yield candidate
            if box.best is candidate:
                break


def together(box: Box) -> Candidates:
    """Fewer bits of all tensors at once."""
    for bits in BITS:
        changed: dict[str, Tensor | None] = {}
        for name in VALUED:
            x = box.best.case.get(name)
            if x is not None:
                changed[name] = rounded(x, bits, below_one=name in ("g", "beta"))
        candidate = box.best.with_case(
            box.best.case.with_tensors(**changed), f"{bits + 1} bit(s) of all values"
        )
        yield candidate
        if box.best is candidate:
            return


def blocks(box: Box) -> Candidates:
    """The plainest value of each tensor in ever smaller blocks of tokens."""
    for name in ("v", "q", "k", "beta", "g"):
        for size in _halving(box.best.case.n_tokens // 2):
            n_blocks = -(-box.best.case.n_tokens // size)
            if n_blocks > MOST_BLOCKS:
                break
            for block in range(n_blocks):
                yield from _one_block(box, name, slice(block * size, (block + 1) * size))


def _one_block(box: Box, name: str, rows: slice) -> Candidates:
    x = box.best.case[name]
    plain: Callable[[Tensor], Tensor] = _plainest(name, box.best.case.options.gate_space == "linear")
    changed = x.clone()
    changed[rows] = plain(x)[rows]
    candidate = _replaced(box.best, name, changed, f"{name} plain in rows {rows.start} to {rows.stop - 1}")
    if candidate is not None:
        yield candidate


def _plainest(name: str, linear_gate: bool) -> Callable[[Tensor], Tensor]:
    return lambda x: next(plain for _, plain in plain_values(name, x, linear_gate))


def _replaced(best: Candidate, name: str, plain: Tensor, change: str) -> Candidate | None:
    """A candidate with another tensor; None where it is the same one."""
    if torch.equal(plain, best.case[name]):
        return None
    return best.with_case(best.case.with_tensors(**{name: plain}), change)
