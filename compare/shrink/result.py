"""What a shrink found, as values: the smallest case, what it was, what passes next to it, how sure it is."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ...capture.case import Case
from ..store import Signature
from ..sweep.attempt import Attempt
from .asking import Rate
from .candidate import Candidate, Size
from .signature import Fault


class Neighbour(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The nearest candidate that passes."""

    case: Case
    deviations: dict[str, str]
    change: str
    """What is otherwise than in the failing one, in words."""
    attempt: Attempt
    """Its passing run, in a process of its own."""


class Shrunk(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The smallest case found, and how it was found."""

    kernel: str
    version: str | None
    case: Case
    deviations: dict[str, str]
    signature: Signature
    """Of the start: the finding's."""
    fault: Fault
    """What stayed the same all the way."""
    attempt: Attempt
    """The smallest case's failing run."""
    start_rate: Rate
    rate: Rate
    """Of the smallest case, in a new process; no run where it was interrupted."""
    confirmed: bool
    """It failed in the same way in a new process."""
    start_size: Size
    size: Size
    start_words: str
    words: str
    neighbour: Neighbour | None = None
    accepted: tuple[str, ...] = ()
    """The changes that were kept, in order."""
    tried: int = 0
    """Candidates that were run."""
    runs: int = 0
    stopped: str = "smallest"
    """`smallest`: nothing smaller was found; `budget`, `runs` or `interrupted`: it may go on."""
    seconds: float = 0.0
    baseline: dict[str, str] = {}
    path: Path | None = None
    command: str = ""

    @property
    def exit_status(self) -> int:
        return 130 if self.stopped == "interrupted" else 0


def distance(a: Candidate, b: Candidate) -> tuple[bool, int, int]:
    """How far two candidates are apart: axes, then elements and entries that differ.

    A query or value of zero hides any fault, so it comes last.
    """
    masked = a.change.startswith(("q", "v: 0", "v plain"))
    axes = sum(a.deviations.get(n) != b.deviations.get(n) for n in {*a.deviations, *b.deviations})
    elements = abs(a.size.elements - b.size.elements)
    entries = 0
    for name, x in a.case.tensors.items():
        y = b.case.get(name)
        if y is not None and y.shape == x.shape:
            entries += int((x.double() != y.double()).sum())
    return masked, axes, elements + entries


def words_of(case: Case) -> str:
    """`65 tokens, 1 head, 16 x 16`."""
    n, heads = case.n_sequences, case["v"].shape[1]
    sequences = "" if n == 1 else f" in {n} sequences"
    sizes = f"{case['q'].shape[-1]} x {case['v'].shape[-1]}"
    plural = ("" if case.n_tokens == 1 else "s", "" if heads == 1 else "s")
    return f"{case.n_tokens} token{plural[0]}{sequences}, {heads} head{plural[1]}, {sizes}"
