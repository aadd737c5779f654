"""Verdicts, places and outcomes: the values that every check returns and every report prints.

The idea: a check never prints and never decides alone. It returns an `Outcome`; `judge` orders the
outcomes by tier and the first that fires decides. The JSON of `diff` is made from these structs only.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

VerdictWord = Literal["pass", "suspect", "fail", "out-of-contract", "error", "timeout", "skipped"]
PlaceClass = Literal["nan", "+inf", "-inf", "wrong", "moves"]

# Worst first: the verdict of several results is the first of these that occurs among them.
VERDICT_ORDER: tuple[VerdictWord, ...] = (
    "fail",
    "error",
    "timeout",
    "out-of-contract",
    "suspect",
    "pass",
    "skipped",
)
FAILING: frozenset[VerdictWord] = frozenset({"fail", "error", "timeout", "out-of-contract"})


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where something is wrong; absent parts are None.

    Indices are 0-based; chunk and token count inside their sequence.
    """

    tensor: str
    """`output`, `state`, or a stage's name."""
    class_: PlaceClass = msgspec.field(name="class")
    sequence: int | None = None
    head: int | None = None
    chunk: int | None = None
    token: int | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found."""

    check: str
    """The check's name, e.g. `state-bound`."""
    tier: int
    status: Literal["ok", "fires", "suspect", "not-applicable"]
    reason: str = ""
    """One sentence with the numbers and the rule."""
    place: Place | None = None
    numbers: dict[str, Any] = {}
    """Measured values, the limit, and `would_pass`: the tolerance that would have passed."""


class ContractDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A declared departure from the pure truth that explains a difference."""

    clause: str
    size: float
    """Largest share of a tile's error that the clause explains, relative to the truth's RMS."""
    text: str


class StageFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a chunk kernel against its float64 value (`stages`)."""

    stage: str
    """cumsum, kkt, solve, wu, state or output."""
    made: bool
    """The stage errs by itself: also on the truth's values."""
    handed_on: bool
    """The stage's value is wrong because what it read was."""
    ratio: float
    """Largest ratio to the emulation's error at this stage (fed with the truth where the error is made)."""
    place: Place | None = None
    reason: str = ""
    ratio_fed: float = 0.0
    """The ratio when the stage is handed the truth's values."""
    ratio_chain: float = 0.0
    """The ratio of its value in the kernel's own chain."""


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one kernel's answer to one case, before it knows its file, layer and time."""

    verdict: VerdictWord
    tier: int | None = None
    rule: str | None = None
    """Name of the check that decided."""
    reason: str = ""
    contract_differences: tuple[ContractDifference, ...] = ()
    first_nonfinite: Place | None = None
    worst_tile: Place | None = None
    error: dict[str, float | None] = {}
    """Global relative RMS error of `output` and `state`."""
    ratio: float | None = None
    """Largest RMS ratio of a tile to the emulation's."""
    outcomes: tuple[Outcome, ...] = ()
    """All checks, in the order in which they decide."""


class DiffResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a diff: a kernel on a case."""

    kernel: str
    case: str
    """The file's name, or what a case that is no file is called."""
    layer: int | None
    ruling: Ruling
    seconds: float | None = None
    """Time of the kernel alone, in the first call (compile included)."""
    evidence: dict[str, Any] = {}

    @property
    def verdict(self) -> VerdictWord:
        return self.ruling.verdict
