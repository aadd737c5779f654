"""What the answers of a repeated call add up to: one verdict, with the relation that moving bits break.

The idea: a run that is wrong by itself decides first. Where none is, bits that differ are looked at by where
they differ: among the warm runs of one process (run-to-run: a race, or memory that nothing wrote), between a
process's first call and its later ones (first-vs-warm), or between processes only (across-processes: another
tuner's pick, say). Each binds as far as the contract promises it; beyond rounding it always does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ..kernels.contract import Contract
from .statistics import CONFIDENCE, chance_of_clean, rate_interval, ruled_out
from .verdict import VERDICT_ORDER, Outcome, Place, Ruling, VerdictWord

FAILED = ("fail", "error", "timeout")


class Kind(msgspec.Struct, kw_only=True):
    """One distinct answer: the same bits, or the same way of giving none."""

    ruling: Ruling
    first: int
    """0-based number of the run in which it was first seen, over all processes."""
    runs: int = 0
    answered: bool = True
    """It came with outputs; False for an error, a crash or a timeout."""
    moved: Outcome | None = None
    """Against the first answer of all: where they differ and whether rounding explains it."""

    @property
    def failed(self) -> bool:
        return self.ruling.verdict in FAILED

    @property
    def place(self) -> Place | None:
        return self.ruling.first_nonfinite or self.ruling.worst_tile


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run: in which process, whether it was that process's first, beside what, with which answer."""

    process: int
    cold: bool
    busy: bool
    kind: int
    seconds: float | None


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a series."""

    verdict: VerdictWord
    reason: str
    place: Place | None = None
    tier: int | None = None
    rule: str | None = None


def ruled(
    contract: Contract, kinds: Sequence[Kind], runs: Sequence[Run], confidence: float = CONFIDENCE
) -> Found:
    """Rule on a series of runs; kinds as numbered by the runs."""
    worst = min(kinds, key=lambda kind: (VERDICT_ORDER.index(kind.ruling.verdict), kind.first))
    notes = list(_moving(contract, kinds, runs))
    words = [note.reason for note in notes]
    if worst.failed:
        words.insert(0, _failing(kinds, runs, worst, confidence))
        return _of(worst, "; ".join(words))
    if worst.ruling.verdict in ("out-of-contract", "skipped"):
        return _of(worst, "; ".join([worst.ruling.reason, *words]))
    broken = next((note for note in notes if note.status == "fires"), None)
    if broken is not None:
        ordered = [broken.reason, *(word for word in words if word is not broken.reason)]
        return Found(
            verdict="fail", reason="; ".join(ordered), place=broken.place, tier=broken.tier, rule=broken.check
        )
    words.insert(0, _clean(len(runs), confidence))
    if worst.ruling.verdict == "suspect":
        words.insert(0, worst.ruling.reason)
    return _of(worst, "; ".join(words))


def _of(kind: Kind, reason: str) -> Found:
    ruling = kind.ruling
    return Found(verdict=ruling.verdict, reason=reason, place=kind.place, tier=ruling.tier, rule=ruling.rule)


def _failing(kinds: Sequence[Kind], runs: Sequence[Run], worst: Kind, confidence: float) -> str:
    """How many fail, and the worst of them in its own words."""
    failures = sum(kind.runs for kind in kinds if kind.failed)
    low, high = rate_interval(failures, len(runs), confidence)
    where = runs[worst.first]
    number = sum(run.process == where.process for run in runs[: worst.first])
    return (
        f"{failures} of {len(runs)} runs fail ({failures / len(runs):.3g}; two-sided {confidence:.0%} "
        f"interval {low:.3g} to {high:.3g}), first run {number} of process {where.process}: "
        f"{worst.ruling.reason}"
    )


def _clean(n_runs: int, confidence: float) -> str:
    return (
        f"no failure in {n_runs} runs: rates above {ruled_out(n_runs, confidence):.3g} are ruled out "
        f"(one-sided {confidence:.0%}); a failure of 1 in 9 would have stayed hidden with a chance of "
        f"{chance_of_clean(1 / 9, n_runs):.2g}"
    )


def _moving(contract: Contract, kinds: Sequence[Kind], runs: Sequence[Run]) -> Iterator[Outcome]:
    """An outcome per relation under which answers differ."""
    answers = {number for number, kind in enumerate(kinds) if kind.answered}
    warm: dict[int, list[int]] = {}
    cold: dict[int, int] = {}
    for run in runs:
        if run.kind not in answers:
            continue
        if run.cold:
            cold[run.process] = run.kind
        else:
            warm.setdefault(run.process, []).append(run.kind)
    within = {n for found in warm.values() if len(set(found)) > 1 for n in found}
    if within:
        yield _outcome("run-to-run", contract, kinds, within, "warm runs of one process")
    first = {n for process, n in cold.items() if process in warm and n not in warm[process]}
    if first:
        yield _outcome(
            "first-vs-warm", contract, kinds, first | {warm[p][0] for p in warm}, "a first call and warm ones"
        )
    settled = {found[0] for found in warm.values() if len(set(found)) == 1}
    settled |= {n for process, n in cold.items() if process not in warm}
    if len(settled) > 1:
        yield _outcome("across-processes", contract, kinds, settled, "processes that agree with themselves")


def _outcome(
    relation: str, contract: Contract, kinds: Sequence[Kind], numbers: set[int], who: str
) -> Outcome:
    """How far these answers differ, and whether the contract lets them."""
    promise = contract.relation(relation)
    moved = [kinds[n].moved for n in sorted(numbers) if kinds[n].moved is not None]
    beyond = any(outcome.status == "fires" for outcome in moved if outcome is not None)
    example = next((o for o in moved if o is not None and (not beyond or o.status == "fires")), None)
    place = None if example is None else example.place
    size = "" if example is None else f", by up to {example.numbers.get('largest_difference', 0):.3g}"
    explained = "beyond what rounding explains" if beyond else "within the limit of tier 3"
    status = "fires" if promise == "promised" or (beyond and promise != "not promised") else "ok"
    reason = f"{relation} ({promise}): {len(numbers)} distinct outputs among {who}{size}, {explained}"
    return Outcome(check=relation, tier=4, status=status, reason=reason, place=place)  # type: ignore[arg-type]
