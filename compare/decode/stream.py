"""The token stream of a decode run: every sequence of a case for as many steps as asked, again and again.

The idea: what a state's rounding does shows after thousands of tokens, and no case is made that long; the
tokens of each sequence are repeated in order. Rounding profiles (dtype of the state, of beta, where q and k
are normalised and rounded) are what the same stream can be decoded under.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import msgspec
import torch
from torch import Tensor

from ...capture.case import Case
from ...capture.errors import BadInput
from ..axes.recase import rows_as, rule_only

DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp16": torch.float16, "float16": torch.float16,
}  # fmt: skip
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
L2norm = Literal["in_kernel", "before"]


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Where a decode loop rounds, beside what the kernel rounds itself."""

    state: str = "fp32"
    """dtype that the state is kept in between steps."""
    beta: str | None = None
    """dtype that beta is given in; None: as the case has it."""
    l2norm: L2norm | None = None
    """For raw q and k: normalised in the kernel, or before it and rounded; None: as production."""

    @property
    def text(self) -> str:
        parts = [f"state {self.state}"]
        parts += [f"beta {self.beta}"] if self.beta else []
        parts += [f"l2norm {self.l2norm.replace('_', ' ')}"] if self.l2norm else []
        return ", ".join(parts)


def profiles_of(
    states: Sequence[str], betas: Sequence[str], l2norms: Sequence[L2norm], *, raw: bool
) -> list[Profile]:
    """Every combination. Raises BadInput for a dtype that is none, and for l2norm of normalised q and k."""
    for name in (*states, *betas):
        if name not in DTYPES:
            raise BadInput(f"dtype {name!r} is unknown; use fp32, bf16 or fp16")
    for word in l2norms:
        if word not in ("in_kernel", "before"):
            raise BadInput(f"l2norm is {word!r}; use in_kernel or before")
    if l2norms and not raw:
        raise BadInput("the case's q and k are normalised already; give one with raw q and k for --l2norm")
    given: list[str | None] = list(betas) or [None]
    places: list[L2norm | None] = list(l2norms) or [None]
    combinations = itertools.product(states or ["fp32"], given, places)
    return [
        Profile(state=SHORT[DTYPES[s]], beta=None if b is None else SHORT[DTYPES[b]], l2norm=n)
        for s, b, n in combinations
    ]


def stream_of(case: Case, steps: int) -> Case:
    """The case with every sequence `steps` tokens long, its own tokens repeated in order.

    Empty sequences are left out. Raises BadInput where no sequence has a token.
    """
    whole = rule_only(case)
    starts = case["cu_seqlens"].tolist()
    numbers = [n for n, length in enumerate(case.lengths) if length]
    if not numbers:
        raise BadInput("the case has no token to decode")
    if steps < 1:
        raise BadInput(f"steps is {steps}; give 1 or more")
    turn = torch.arange(steps)
    rows = torch.cat([starts[n] + turn % case.lengths[n] for n in numbers])
    return rows_as(whole, rows, [steps] * len(numbers), numbers)


def first_steps(case: Case, steps: int) -> Case:
    """The first tokens of a stream."""
    length, n = case.lengths[0], case.n_sequences
    rows = torch.cat([torch.arange(i * length, i * length + steps) for i in range(n)])
    return rows_as(case, rows, [steps] * n, list(range(n)))


def under_profile(case: Case, profile: Profile) -> Case:
    """The stream with beta in the profile's dtype."""
    if profile.beta is None:
        return case
    return case.with_tensors(beta=case["beta"].to(DTYPES[profile.beta]))


def checkpoints_of(steps: int, most: int = 7) -> tuple[int, ...]:
    """Numbers of steps at which drift is read: 1, then by a constant power of two up to `steps`."""
    doublings = max(1, (steps - 1).bit_length())
    stride = -(-doublings // (most - 1))
    return tuple(sorted({*(2**i for i in range(0, doublings, stride)), steps}))


def rows_between(case: Case, start: int, stop: int) -> Tensor:
    """[N * (stop - start)] packed rows of tokens start..stop-1 of every sequence."""
    length = case.lengths[0]
    at = torch.arange(case.n_sequences)[:, None] * length
    return (at + torch.arange(start, stop)).flatten()
