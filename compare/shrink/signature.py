"""Is it still the same failure: what of an attempt must stay while everything else shrinks.

The idea: "it fails" is not enough, because a smaller input easily shows another fault. What must stay is the
kind of failure (a crash, a hang, an error of the same words, a NaN, a wrong value, bad input of the same
sort), the tensor, the class, and the place pattern (which side of a chunk, whose sequence). Deviations may
only go. The tier may move among those that judge the case's own numbers: a bound that was loose at 300 tokens
is tight at 65, and an exact case is decided before either. A relation stays the same relation.
"""

from __future__ import annotations

import re

import msgspec

from ...kernels.interface import KernelInfo
from ..store import Signature
from ..sweep.attempt import Attempt
from ..sweep.explain import pattern, words_of
from ..verdict import FAILING, Place

# Checks of the case's own numbers: any of them may decide about the same fault.
NUMERIC = frozenset(
    {"exact", "exact-companion", "companion", "state-bound", "output-bound", "running-bound",
     "emulation-ratio", "low-bits", "tolerance"}
)  # fmt: skip
CRASH = re.compile(r"killed by|exited with|context is lost|closed its connection")
LONGEST_WORDS = 80
# The pattern under which fuzz keeps a failure that comes and goes at different places.
COMES_AND_GOES = "comes and goes"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What makes two attempts show the same failure."""

    kind: str
    """nonfinite, wrong, error, crash, timeout or out-of-contract."""
    rule: str
    """`numbers` for any check of the case's own numbers, else the check's or relation's name."""
    class_: str
    tensor: str | None
    pattern: str
    message: str = ""
    """Of bad input, without its numbers."""
    moves: bool = False
    """It comes and goes at different places: only its kind has to stay."""

    def matches(self, other: Fault | None) -> bool:
        """Whether another attempt shows this failure."""
        if other is None or self.kind != other.kind:
            return False
        if self.moves:
            return True
        return msgspec.structs.replace(other, moves=False) == self

    def in_words(self) -> str:
        parts = [self.kind, self.tensor or "", self.class_ if self.kind != self.class_ else "", self.pattern]
        if self.rule not in ("numbers", "", self.kind):
            parts.insert(1, self.rule)
        if self.message:
            parts.append(self.message[:LONGEST_WORDS])
        return ", ".join(p for p in dict.fromkeys(parts) if p and p != "no place")


def fault_of(attempt: Attempt, chunk_size: int | None) -> Fault | None:
    """The failure that an attempt shows; None where it shows none."""
    if attempt.verdict not in FAILING:
        return None
    place: Place | None = attempt.place
    if attempt.verdict in ("error", "timeout"):
        # A hang may be seen as a timeout only; a crash is told from an error by its words.
        kind: str = attempt.verdict
        if kind == "error" and CRASH.search(attempt.reason):
            kind = "crash"
        return Fault(kind=kind, rule="", class_="error", tensor=None, pattern=pattern(attempt, chunk_size))
    if attempt.verdict == "out-of-contract":
        return Fault(
            kind="out-of-contract", rule=attempt.rule or "", class_=place.class_ if place else "",
            tensor=place.tensor if place else None, pattern="", message=words_of(attempt.reason)[:40],
        )  # fmt: skip
    rule = attempt.rule or ""
    return Fault(
        kind="nonfinite" if attempt.nonfinite else "wrong",
        rule="numbers" if rule in NUMERIC or attempt.nonfinite else rule,
        class_=place.class_ if place is not None else "wrong",
        tensor=None if place is None else place.tensor,
        pattern=pattern(attempt, chunk_size),
    )


def signature_of(attempt: Attempt, info: KernelInfo, chunk_size: int | None) -> Signature:
    """The signature under which a store keeps this failure."""
    fault, place = fault_of(attempt, chunk_size), attempt.place
    return Signature(
        kernel=attempt.kernel,
        version=info.version,
        tier=attempt.tier,
        class_=class_of(fault, place),
        stage=None if place is None else place.tensor,
        deviations=attempt.deviations,
        place_pattern=pattern(attempt, chunk_size),
    )


def class_of(fault: Fault | None, place: Place | None) -> str:
    """A signature's class: `error` for a kernel that gave no answer, else the place's."""
    if fault is not None and fault.class_ == "error":
        return "error"
    return place.class_ if place is not None else "wrong"


def agrees(signature: Signature, attempt: Attempt, chunk_size: int | None) -> bool:
    """Whether an attempt shows what a stored signature says; the tier may be another of the numbers'."""
    fault = fault_of(attempt, chunk_size)
    if fault is None:
        return False
    place = attempt.place
    if signature.place_pattern == COMES_AND_GOES:
        classes = {"moves": ("wrong", "moves")}.get(signature.class_, (signature.class_,))
        return class_of(fault, place) in classes
    # Relations are tier 4, the case's own numbers 0 to 3.
    tiers = {t is not None and t >= 4 for t in (signature.tier, attempt.tier)}
    return (
        class_of(fault, place) == signature.class_
        and (None if place is None else place.tensor) == signature.stage
        and pattern(attempt, chunk_size) == signature.place_pattern
        and len(tiers) == 1
    )
