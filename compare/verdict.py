"""Verdicts, places and outcomes: the values that every check returns and every report prints.

The idea: a check never prints and never decides alone. It returns an `Outcome`; `judge` orders the
outcomes by tier and the first that fires decides. The JSON of `diff` is made from these structs only.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def exit_status_of(verdicts: Iterable[VerdictWord], *, strict: bool, differences: bool = False) -> int:
    """0, 1 or 3 of the design, for the verdicts of one command.

    differences: contract differences were named; with strict they count, as suspects do.
    """
    words = set(verdicts)
    if words <= {"skipped"}:
        return 3
    if words & FAILING:
        return 1
    return int(strict and (differences or "suspect" in words))


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
    """Largest distance that the clause moves a tile of the truth, relative to the tile's RMS."""
    tokens: int = 0
    """Tokens whose output the clause moves by more than half an ulp of what the kernel stores."""
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


class OpFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of a chain (`ops.chain`): what it makes of the truth's input, of its own, and in all."""

    op: str
    """conv, split, post-conv, l2norm, gate, rule, norm or core."""
    kernel: str
    verdict: VerdictWord
    """On what it makes itself: of the truth's input, and of the input that the chain handed it."""
    made: bool
    """It errs by itself."""
    handed_on: bool
    """Its value in the chain departs because what it read did."""
    ratio_fed: float | None = None
    """Largest RMS ratio to the emulation's error, on the truth's input."""
    ratio_own: float | None = None
    """The same on the input that the chain handed it, against the truth of that input."""
    ratio_chain: float | None = None
    """Of its value in the chain against the chain's truth, to an honest chain's error."""
    place: Place | None = None
    reason: str = ""
    error: dict[str, float | None] = {}
    """Relative RMS error of each output in the chain, against the chain's truth."""
    contract_differences: tuple[ContractDifference, ...] = ()


class Hypothesis(msgspec.Struct, frozen=True, kw_only=True):
    """A function of the catalogue (`hypotheses`) that explains an answer which the contract does not."""

    clause: str
    """Its id in the catalogue, e.g. `l2norm.eps 1e-05`."""
    text: str
    excusable: bool
    """A sound kernel may compute this and have forgotten to declare it: the verdict is `suspect`."""
    explained: float
    """Share of the departure, in squares, that it explains."""


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
    """Global relative RMS error of `output` and `state`, against the truth under the kernel's clauses."""
    error_pure: dict[str, float | None] = {}
    """The same against the pure truth."""
    by_tolerance: tuple[str, ...] = ()
    """Tensors that a tolerance of the caller's judged instead of tiers 2 and 3."""
    hypothesis: Hypothesis | None = None
    """What the answer looks like, where no declared clause explains it."""
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
    stages: tuple[StageFinding, ...] = ()
    """Stage by stage, where the diff was asked for it."""
    stages_note: str = ""
    """Why there are no stages."""
    ops: tuple[OpFinding, ...] = ()
    """Operation by operation, where a whole core was judged."""

    @property
    def verdict(self) -> VerdictWord:
        return self.ruling.verdict
