"""What a wrong integer of an exact case gives away: whose value stands where another's should.

The idea: in an exact case each row of v and of the state is different from every other, and an output row is
one of them (times scale, with q's sign). So the row that came back names the token that leaked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .domain_place import locate
from .truth import truth

ENOUGH_CHANNELS = 2  # wrong channels that must match before a partly wrong row is said to be another's


@dataclass(frozen=True)
class ExactReading:
    """The first wrong row of an exact case."""

    tensor: str
    sequence: int
    head: int
    token: int | None
    """None for a state."""
    channel: int | None
    """Key channel of a wrong state row."""
    got: float
    want: float
    text: str
    """E.g. `token 64 of sequence 0 was read as token 0 of sequence 1`."""


def exact_expected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    l2norm: bool = False,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """What a kernel must return bit for bit: output [T, HV, V] in v's dtype, final state [N, HV, K, V].

    Only meaningful where `exact.is_exact` says so.
    """
    output, state = truth(
        q, k, v, g, beta, cu_seqlens=cu_seqlens, initial_state=initial_state, scale=scale, l2norm=l2norm
    )
    return output.to(v.dtype), state.to(state_dtype)


def decode_exact(
    got: Tensor,
    want: Tensor,
    *,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    initial_state: Tensor | None = None,
) -> ExactReading | None:
    """Name the first wrong row, in packed order, and whose value it holds; None where all bits agree.

    got, want: outputs [T, HV, V], or final states [N, HV, K, V] (told apart by rank).
    """
    got64, want64 = got.double(), want.double()
    bad = ~(got64 == want64)
    if not bool(bad.any()):
        return None
    index = tuple(int(i) for i in bad.nonzero()[0])
    is_output = got.dim() == 3
    row_at, head = index[:-1], index[1]
    unit = scale if is_output else 1.0
    got_row, want_row = got64[row_at] / unit, want64[row_at] / unit
    wrong = bad[row_at]
    sequence, token = locate(cu_seqlens, index[0]) if is_output else (index[0], None)
    where = f"token {token} of sequence {sequence}"
    if not is_output:
        where = f"row {index[2]} of the state of sequence {sequence}"
    owners = _Owners(v.double(), None if initial_state is None else initial_state.double(), cu_seqlens, head)
    right = owners.name(want_row, torch.ones_like(wrong)) or "the right value"
    found = owners.name(got_row, wrong)
    text = f"{right} was read as {found}" if found else f"{right} was replaced by a value that no row holds"
    return ExactReading(
        "output" if is_output else "state", sequence, head, token, None if is_output else index[2],
        float(got64[index]), float(want64[index]), f"at {where}, head {head}: {text}",
    )  # fmt: skip


@dataclass(frozen=True)
class _Owners:
    v: Tensor
    state: Tensor | None
    cu_seqlens: Tensor
    head: int

    def name(self, row: Tensor, channels: Tensor) -> str | None:
        """Who owns `row` [V] on `channels` [V] bool, up to sign; the same head is tried first."""
        if not bool(torch.isfinite(row).all()):
            return "a number that is not finite"
        if not bool(row[channels].any()):
            return "zero"
        if int(channels.sum()) < min(ENOUGH_CHANNELS, len(row)):
            return None
        for head in [self.head, *(h for h in range(self.v.shape[1]) if h != self.head)]:
            found = self._in_head(row[channels], channels, head)
            if found:
                return found if head == self.head else f"{found}, head {head}"
        return None

    def _in_head(self, part: Tensor, channels: Tensor, head: int) -> str | None:
        hits = _same(self.v[:, head][:, channels], part)
        if len(hits):
            sequence, token = locate(self.cu_seqlens, int(hits[0, 0]))
            return f"token {token} of sequence {sequence}"
        if self.state is None:
            return None
        hits = _same(self.state[:, head][..., channels], part)
        if len(hits):
            return f"row {int(hits[0, 1])} of the initial state of sequence {int(hits[0, 0])}"
        if self.state.shape[2] == self.state.shape[3]:
            hits = _same(self.state[:, head].mT[..., channels], part)
            if len(hits):
                return f"column {int(hits[0, 1])} of the initial state of sequence {int(hits[0, 0])}"
        return None


def _same(rows: Tensor, part: Tensor) -> Tensor:
    """Indices of the rows [..., n] that equal `part` [n] or its negative."""
    return ((rows == part).all(-1) | (rows == -part).all(-1)).nonzero()
