"""Lengths of q and k: a forgotten or doubled l2norm, norms that overflow, rows that eps dominates.

The idea: where q and k are said to be normalised, their rows have length 1 up to rounding (or are zero, as
padding); where they are raw, l2norm must be able to make them so. beta |k|^2 decides what a long key does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from .domain_place import DomainFinding, place

# |x|^2 of a unit row in bf16 stays below 1 + 2^-7 when it was rounded once; 2^-6 leaves room for a norm
# that was itself formed in bf16. float32 rows may have been bf16 before, so every dtype gets the same room.
UNIT_ROOM = 2.0**-6
L2NORM_EPS = 1e-6
EPS_SHARE = 100.0  # below EPS_SHARE * eps, the eps takes more than 0.5 % off the row's length
SHORT = 0.25  # a typical |x|^2 below this says that the rows were never normalised


def key_findings(
    q: Tensor, k: Tensor, beta: Tensor, cu_seqlens: Tensor, qk: Literal["raw", "normalised"]
) -> Iterator[DomainFinding]:
    """Findings about the lengths of q and k, [T, HK, K], given beta [T, HV]."""
    for name, x in (("k", k), ("q", q)):
        if not x.numel():
            continue
        squared = x.double().square().sum(-1)
        finite = torch.isfinite(squared) & torch.isfinite(x.float()).all(-1)
        zero = finite & (squared == 0)
        yield from place(
            "zero-row",
            "hint",
            name,
            squared,
            zero,
            cu_seqlens,
            "a row of zeros (padding) reads and writes nothing",
        )
        check = _raw if qk == "raw" else _normalised
        yield from check(name, squared, finite & ~zero, beta, cu_seqlens)


def _normalised(
    name: str, squared: Tensor, usable: Tensor, beta: Tensor, cu: Tensor
) -> Iterator[DomainFinding]:
    norm = squared.sqrt()
    long = usable & (squared > 1.0 + UNIT_ROOM)
    kind = "key-norm" if name == "k" else "query-norm"
    if bool(long.any()):
        missing = "the length should be 1: was l2norm forgotten, or should the case say that q and k are raw"
        if name == "q":
            yield from place(kind, "hint", name, norm, long, cu, f"{missing}; outputs scale with it")
            return
        growing = long & (_strength(squared, beta) > 1.0 + UNIT_ROOM)
        if bool(growing.any()):
            strongest = float(_strength(squared, beta)[growing].max())
            yield from place(
                kind, "outside", name, norm, growing, cu,
                f"{missing}; beta |k|^2 reaches {strongest:.3g}, so the inverse and rounding errors grow",
            )  # fmt: skip
        else:
            yield from place(
                kind, "hint", name, norm, long, cu, f"{missing}; beta is small enough to be stable"
            )
        return
    if bool(usable.any()) and float(squared[usable].median()) < SHORT:
        yield from place(
            kind, "hint", name, norm, usable & (squared < SHORT), cu,
            "most rows are far shorter than 1: was l2norm forgotten, or is eps larger than the row",
        )  # fmt: skip


def _raw(name: str, squared: Tensor, usable: Tensor, beta: Tensor, cu: Tensor) -> Iterator[DomainFinding]:
    norm = squared.sqrt()
    yield from place(
        "l2norm-overflow", "bad-input", name, norm, usable & (squared > torch.finfo(torch.float32).max), cu,
        "the sum of squares overflows float32, so l2norm gives a row of zeros (or NaN)",
    )  # fmt: skip
    yield from place(
        "eps-dominated", "hint", name, norm, usable & (squared < EPS_SHARE * L2NORM_EPS), cu,
        "l2norm's eps 1e-6 shortens the row visibly, and a kernel with another eps differs here",
    )  # fmt: skip
    if bool(usable.any()) and bool(((squared[usable] - 1.0).abs() < UNIT_ROOM).all()):
        yield from place(
            "double-l2norm", "hint", name, norm, usable, cu,
            "every row has length 1 already although the case says raw: l2norm would be applied twice",
        )  # fmt: skip


def _strength(squared: Tensor, beta: Tensor) -> Tensor:
    """[T, HK] largest beta |k|^2 over the value heads that read a key head."""
    heads, keys = beta.shape[1], squared.shape[1]
    largest = beta.double().nan_to_num(0.0).reshape(len(beta), keys, heads // keys).amax(-1)
    return largest * squared
