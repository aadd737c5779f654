"""T = (I + A)^-1 of a unit lower triangular matrix, in the ways that kernels compute it.

The idea: the ways agree in exact arithmetic and not in float32: on nearly parallel keys a doubling inverse
loses digits that substitution keeps, and a merge in tf32 shows in T. So the way is part of a kernel's
precision. Rounding of T itself (`solve`) is the caller's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .emulation_arithmetic import Arithmetic

_BLOCK = 16  # FLA's diagonal block (utils/solve_tril.py)
_SMALL_BLOCK = 8  # FlashInfer's (flat_collective_inverse.hpp)


def inverse(a: Tensor, arithmetic: Arithmetic) -> Tensor:
    """(I + a)^-1 for strictly lower a, [..., C, C], by the way that the precision names.

    `direct` has no T of its own and gets substitution's. A chunk size that 16 does not divide (for `merged`:
    that is not 8 times a power of two) has no blocks: substitution there too.
    """
    way = arithmetic.precision.solve
    size = a.shape[-1]
    if way == "doubling":
        return _by_doubling(a, arithmetic)
    if way == "merged" and size > _SMALL_BLOCK and size & (size - 1) == 0:
        return _by_merging(a, arithmetic)
    if way == "blocked" and size % _BLOCK == 0 and size > _BLOCK:
        return _by_blocks(a, arithmetic)
    return _by_substitution(a, arithmetic)


def solve_direct(a: Tensor, b: Tensor) -> Tensor:
    """(I + a)^-1 b by a triangular solve, without T (transformers' torch kernel)."""
    solved: Tensor = torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)
    return solved


def _by_substitution(a: Tensor, arithmetic: Arithmetic | None = None) -> Tensor:
    """Row i of T is e_i - a_i T, in the rows above it, as FLA's 16 x 16 kernel does elementwise.

    arithmetic: rounds each row, as `solve_step`, before the rows below use it; None: no row is rounded.
    """
    size = a.shape[-1]
    t = -a.clone()
    for i in range(2, size):
        row = t[..., i : i + 1, :i].clone()
        row = row + row @ t[..., :i, :i]
        t[..., i : i + 1, :i] = row if arithmetic is None else arithmetic.cast("solve_step", row)
    return t + torch.eye(size, dtype=a.dtype, device=a.device)


def _by_blocks(a: Tensor, arithmetic: Arithmetic) -> Tensor:
    """FLA's: invert the 16 x 16 diagonal blocks by substitution, then merge below the diagonal.

    The block next to the diagonal is -(T_ii A_ij) T_jj, one further off -T_ii sum_m A_im T_mj.
    """
    size = a.shape[-1]
    n = size // _BLOCK
    blocks = a.reshape(*a.shape[:-2], n, _BLOCK, n, _BLOCK).transpose(-3, -2)
    diagonal = _by_substitution(torch.stack([blocks[..., i, i, :, :] for i in range(n)], dim=-3))
    t: dict[tuple[int, int], Tensor] = {(i, i): diagonal[..., i, :, :] for i in range(n)}
    for distance in range(1, n):
        for j in range(n - distance):
            i = j + distance
            if distance == 1:
                left = arithmetic.dot("solve", t[i, i], blocks[..., i, j, :, :])
                t[i, j] = -arithmetic.dot("solve", left, t[j, j])
                continue
            total = arithmetic.dot("solve", blocks[..., i, j, :, :], t[j, j])
            for m in range(j + 1, i):
                total = total + arithmetic.dot("solve", blocks[..., i, m, :, :], t[m, j])
            t[i, j] = -arithmetic.dot("solve", t[i, i], total)
    out = torch.zeros_like(a)
    for (i, j), block in t.items():
        rows, columns = slice(i * _BLOCK, (i + 1) * _BLOCK), slice(j * _BLOCK, (j + 1) * _BLOCK)
        out[..., rows, columns] = block
    return out


def _by_doubling(a: Tensor, arithmetic: Arithmetic) -> Tensor:
    """(I - a)(I + a^2)(I + a^4)...: log2(C) steps; powers of a can be huge where T is not."""
    size = a.shape[-1]
    identity = torch.eye(size, dtype=a.dtype, device=a.device)
    power = arithmetic.cast("solve_step", -a)
    t = identity + power
    reach = 2
    while reach < size:
        power = arithmetic.cast("solve_step", arithmetic.dot("solve", power, power))
        t = arithmetic.cast("solve_step", t + arithmetic.dot("solve", t, power))
        reach *= 2
    return t


def _by_merging(a: Tensor, arithmetic: Arithmetic) -> Tensor:
    """FlashInfer's: invert 8 x 8 diagonal blocks row by row, then join two by two by -(D^-1 C) A^-1.

    The blocks, D^-1 C and the joined corner are kept in the format of `solve_step`.
    """
    size = a.shape[-1]
    t = torch.zeros_like(a)
    for start in range(0, size, _SMALL_BLOCK):
        here = slice(start, start + _SMALL_BLOCK)
        t[..., here, here] = arithmetic.cast("solve_step", _by_substitution(a[..., here, here]))
    half = _SMALL_BLOCK
    while half < size:
        for start in range(0, size, 2 * half):
            first, second = slice(start, start + half), slice(start + half, start + 2 * half)
            left = arithmetic.dot("solve", t[..., second, second], a[..., second, first])
            corner = arithmetic.dot("solve", arithmetic.cast("solve_step", left), t[..., first, first])
            t[..., second, first] = arithmetic.cast("solve_step", -corner)
        half *= 2
    return t
