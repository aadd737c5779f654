"""A finding of the domain check and how a mask of bad entries becomes one: the earliest row, and a count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Severity = Literal["bad-input", "outside", "hint"]


@dataclass(frozen=True)
class DomainFinding:
    """One way in which the input leaves the domain."""

    kind: str
    """non-finite, index, huge, gate-sign, gate-space, gate-inf, gate-overflow, decay-sum, cancellation,
    beta-range, beta-above-1, key-norm, query-norm, zero-row, eps-dominated, l2norm-overflow or
    double-l2norm."""
    severity: Severity
    tensor: str
    sequence: int | None = None
    head: int | None = None
    """Key head for q and k, else value head."""
    token: int | None = None
    """Inside its sequence; None for a state."""
    value: float = 0.0
    """The offending number, e.g. the entry, or the norm of a row."""
    consequence: str = ""
    row: int | None = None
    """Packed row of the token."""
    count: int = 1
    """Rows (tokens or sequences) that are affected."""


def place(
    kind: str,
    severity: Severity,
    tensor: str,
    values: Tensor,
    bad: Tensor,
    cu_seqlens: Tensor | None,
    consequence: str,
) -> Iterator[DomainFinding]:
    """The finding at the first True of `bad` (shaped as `values`, [rows, heads, ...]); nothing without one.

    cu_seqlens: [N+1] where rows are packed tokens; None where a row is a sequence.
    """
    rows = bad.flatten(1).any(1).nonzero().flatten() if bad.numel() else bad.new_empty(0)
    if not len(rows):
        return
    row = int(rows[0])
    index = tuple(int(i) for i in bad[row].nonzero()[0])
    value = float(values[(row, *index)])
    sequence, token = (row, None) if cu_seqlens is None else locate(cu_seqlens, row)
    yield DomainFinding(
        kind, severity, tensor, sequence, index[0], token, value, consequence,
        None if cu_seqlens is None else row, len(rows),
    )  # fmt: skip


def locate(cu_seqlens: Tensor, row: int) -> tuple[int, int]:
    """Packed row -> (sequence, token inside it)."""
    sequence = int(torch.searchsorted(cu_seqlens.contiguous(), row, right=True)) - 1
    return sequence, row - int(cu_seqlens[sequence])
