"""The start of a shrink: does it fail at all, how, how often, and what shows it.

The idea: shrinking something that does not fail finds nothing, and shrinking a failure of another signature
finds the wrong thing, so both end in one line before any candidate is made. The case's own numbers are asked
first, repeatedly; the relations only where those show nothing, since a kernel that moves by itself breaks
relations, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...capture.errors import BadInput
from ..checks import companion, inputs_kept
from ..relations.plan import RELATIONS
from ..session import Settings, diff_one
from ..soundness import Soundness, soundness_of
from ..store import Signature
from ..sweep.attempt import Attempt
from ..verdict import FAILING
from ..witness import Witness
from .asking import MOST_FIRST_RUNS, Rate, measure
from .candidate import Candidate
from .oracle import Oracle
from .result import words_of
from .signature import Fault, agrees, fault_of, signature_of

Say = Callable[..., None]
Wanted = Signature | str | None
# A kernel that takes so many seconds is not run sixty times before it is said to pass.
FEW_FIRST_RUNS, SLOW = 10, 0.5
AHEAD = 4
# Tiers that judge the case's own numbers.
NUMBER_TIERS = (0, 1, 2, 3)


class Meter:
    """The oracle, with what it may still cost."""

    def __init__(self, oracle: Oracle, budget: float | None, most_runs: int | None) -> None:
        self.oracle = oracle
        self.started = time.monotonic()
        self.deadline = float("inf") if budget is None else self.started + budget
        self.most_runs = float("inf") if most_runs is None else most_runs
        self.runs = 0

    def see(self, candidate: Candidate, **options: Any) -> Attempt:
        self.runs += 1
        return self.oracle.see(candidate, **options)

    def late(self) -> bool:
        return self.out_of_time or self.runs >= self.most_runs

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A start that fails."""

    rate: Rate
    fault: Fault
    """What has to stay."""
    attempt: Attempt
    signature: Signature
    soundness: Soundness


def check_start(meter: Meter, start: Candidate, wanted: Wanted, known: Rate | None, say: Say) -> Started:
    """Run the start until it fails, and measure how often.

    wanted: the signature that it has to have. known: the rate, where it was measured before.
    Raises BadInput where it does not fail, or not as wanted.
    """
    oracle = meter.oracle
    sound = oracle.soundness(start.case)
    say(f"running the start ({words_of(start.case)})")
    rate, shown, other = _measured(meter, start, wanted, known)
    if not shown and not start.deviations:
        say("the numbers of the case show nothing: trying the relations")
        _find_relation(meter, start)
        if oracle.relation:
            rate, shown, other = _measured(meter, start, wanted, known)
    if not shown:
        assert other is not None
        raise BadInput(_does_not_fail(oracle, start, rate, other, wanted))
    fault = common_fault([fault_of(attempt, oracle.chunk_size) for attempt in shown])
    oracle.may_hang = fault.kind == "timeout"
    oracle.look_for(fault.kind)
    return Started(
        rate=known or rate,
        fault=fault,
        attempt=shown[0],
        signature=_kept_signature(oracle, shown[0], wanted),
        soundness=sound,
    )


def _kept_signature(oracle: Oracle, attempt: Attempt, wanted: Wanted) -> Signature:
    """The finding's own signature where it was given, so that a smaller case stays the same finding."""
    if isinstance(wanted, Signature):
        return wanted
    found = named(oracle, attempt, wanted) if wanted is not None else None
    return found or signature_of(attempt, oracle.info, oracle.chunk_size)


def common_fault(faults: Sequence[Fault | None]) -> Fault:
    """What all failing runs of the start share: the first's fault, or its kind where they differ."""
    first = faults[0]
    assert first is not None
    if all(first.matches(fault) for fault in faults):
        return first
    return msgspec.structs.replace(first, moves=True)


def _measured(
    meter: Meter, start: Candidate, wanted: Wanted, known: Rate | None
) -> tuple[Rate, list[Attempt], Attempt | None]:
    """Runs of the start: how many show the failure, those that do and one that does not."""
    shown: list[Attempt] = []
    chunk = meter.oracle.chunk_size

    def is_same(attempt: Attempt) -> bool:
        same = _is_wanted(meter.oracle, attempt, wanted)
        if shown:
            # Of one kind, at whatever place: what varies here may vary later.
            first, again = fault_of(shown[0], chunk), fault_of(attempt, chunk)
            same = first is not None and again is not None and first.kind == again.kind
        if same:
            shown.append(attempt)
        return same

    first = meter.see(start)
    kept = [first]
    most = MOST_FIRST_RUNS if first.seconds < SLOW else FEW_FIRST_RUNS

    def see() -> Attempt:
        return kept.pop() if kept else meter.see(start, ahead=AHEAD)

    def late() -> bool:
        return meter.late() or (known is not None and bool(shown))

    rate, _, other = measure(see, is_same, late, first_runs=1 if meter.oracle.relation else most)
    return rate, shown, other


def _is_wanted(oracle: Oracle, attempt: Attempt, wanted: Wanted) -> bool:
    if attempt.verdict not in FAILING:
        return False
    if wanted is None or isinstance(wanted, str):
        return wanted is None or named(oracle, attempt, wanted) is not None
    return agrees(wanted, attempt, oracle.chunk_size)


def named(oracle: Oracle, attempt: Attempt, digest: str) -> Signature | None:
    """The attempt's signature under a digest; of a failure in the numbers the tier may have moved since."""
    found = signature_of(attempt, oracle.info, oracle.chunk_size)
    tiers = NUMBER_TIERS if found.tier in NUMBER_TIERS else (found.tier,)
    every = [found, *(msgspec.structs.replace(found, tier=tier) for tier in tiers)]
    return next((s for s in every if s.digest == digest), None)


def _find_relation(meter: Meter, start: Candidate) -> None:
    """Ask every relation, as diff does, where the case's own numbers show nothing."""
    oracle = meter.oracle
    witness = Witness(start.case, device=oracle.device, seed=oracle.seed)
    settings = Settings(seed=oracle.seed, relations="all")
    result = diff_one(oracle.limited, witness, soundness_of(witness), settings)
    meter.runs += 1
    rule = result.ruling.rule or ""
    if result.verdict in FAILING and rule in (*RELATIONS, companion.NAME, inputs_kept.NAME):
        oracle.relation = rule


def _does_not_fail(oracle: Oracle, start: Candidate, rate: Rate, other: Attempt, wanted: Wanted) -> str:
    name, kernel = start.case.label, oracle.info.name
    if other.verdict in FAILING:
        found = signature_of(other, oracle.info, oracle.chunk_size).digest
        fault = fault_of(other, oracle.chunk_size)
        asked = wanted.digest if isinstance(wanted, Signature) else wanted
        return (
            f"{name}: {kernel} fails, but not as {asked} says: its signature is {found} "
            f"({'' if fault is None else fault.in_words()}); give that with --signature, or none"
        )
    runs = "1 run" if rate.runs == 1 else f"{rate.runs} runs"
    return (
        f"{name}: {kernel} does not fail on it: {other.verdict} in {runs} ({other.reason}); "
        "give the kernel, version and deviations that it failed with"
    )
