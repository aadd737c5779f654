"""What a fuzz run found and did, read from its store: for the report, for JSON and for the summary.

The idea: the summary says as loudly what was not covered as what was: axes and families never drawn, kernels
that could not run, cases that were in flight when a run died, findings that wait for confirmation.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...capture.make import FAMILIES
from ..axes.table import AXES
from ..statistics import rate_interval, ruled_out
from ..store import FindingRow, RunStore
from ..verdict import VerdictWord
from .journal import INTERRUPTED, Journal
from .plan import Plan

TIMES = ("kernel", "transfer", "reference", "making", "bookkeeping")


class FuzzReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a fuzz run found out."""

    verdict: VerdictWord
    cases: int
    """Judged in this run so far, earlier sittings included."""
    findings: tuple[FindingRow, ...]
    corpus: int
    per_kernel: dict[str, int]
    per_axis: dict[str, int]
    """Axis -> cases in which its change was proved."""
    per_verdict: dict[str, int]
    per_family: dict[str, int]
    seconds: float
    """Of this sitting."""
    spent: dict[str, float]
    """Seconds of all sittings by what they went to; kernels run beside the rest, so they add up to more."""
    survived: int
    """Calls that ended in an error, a crash or a hang."""
    interrupted: int
    """Cases that were in flight when a run died, and are not run again."""
    not_covered: tuple[dict[str, str], ...]
    stopped: str
    """`time`, `cases` or `interrupted`."""
    strict: bool = False
    command: str = ""
    directory: str | None = None

    @property
    def confirmed(self) -> list[FindingRow]:
        return [row for row in self.findings if row.status != "not-reproduced"]

    @property
    def share_of_bookkeeping(self) -> float:
        """Of this process's busy time."""
        own = sum(self.spent.get(name, 0.0) for name in ("reference", "making", "bookkeeping"))
        return self.spent.get("bookkeeping", 0.0) / own if own else 0.0

    @property
    def exit_status(self) -> int:
        """0, 1, 3 or 130 of the design."""
        if self.findings:
            return 1
        if self.stopped == "interrupted":
            return 130
        judged = self.cases - self.per_verdict.get("skipped", 0)
        if not judged:
            return 3
        return int(self.strict and bool(self.per_verdict.get("suspect")))


def report_of(
    store: RunStore,
    plan: Plan,
    *,
    seconds: float,
    stopped: str,
    not_covered: list[dict[str, str]],
    strict: bool,
    command: str,
    kept: bool,
) -> FuzzReport:
    """Read the report of a run's store."""
    tallies = Journal(store).tallies()
    findings = tuple(store.finding_rows())
    (corpus,) = store.execute("SELECT count(*) FROM corpus").fetchone()
    (interrupted,) = store.execute("SELECT count(*) FROM cases WHERE verdict = ?", (INTERRUPTED,)).fetchone()
    cases = int(tallies.get("cases", 0))
    families = _under(tallies, "family.")
    axes = _under(tallies, "axis.")
    verdicts = _under(tallies, "verdict.")
    kernels = _under(tallies, "kernel.")
    left = [*not_covered, *_not_drawn(families, axes, plan, cases)]
    return FuzzReport(
        verdict=_verdict(findings, verdicts, cases),
        cases=cases,
        findings=findings,
        corpus=int(corpus),
        per_kernel=kernels,
        per_axis=axes,
        per_verdict=verdicts,
        per_family=families,
        seconds=seconds,
        spent={name: tallies.get(f"seconds.{name}", 0.0) for name in TIMES},
        survived=int(tallies.get("survived", 0)),
        interrupted=int(interrupted),
        not_covered=tuple(left),
        stopped=stopped,
        strict=strict,
        command=command,
        directory=str(store.directory) if kept else None,
    )


def progress_of(store: RunStore, journal: Journal) -> dict[str, Any]:
    """How far a run is, for a screen."""
    tallies = journal.tallies()
    (corpus,) = store.execute("SELECT count(*) FROM corpus").fetchone()
    (findings,) = store.execute("SELECT count(*) FROM findings").fetchone()
    return {
        "cases": int(tallies.get("cases", 0)), "corpus": corpus, "findings": findings,
        "survived": int(tallies.get("survived", 0)), "kernels": _under(tallies, "kernel."),
        "axes": _under(tallies, "axis."), "verdicts": _under(tallies, "verdict."),
    }  # fmt: skip


def _under(tallies: dict[str, float], prefix: str) -> dict[str, int]:
    return {n.removeprefix(prefix): int(v) for n, v in tallies.items() if n.startswith(prefix)}


def _verdict(findings: tuple[FindingRow, ...], verdicts: dict[str, int], cases: int) -> VerdictWord:
    if any(row.class_ != "error" for row in findings):
        return "fail"
    if findings:
        hangs = all("no answer" in row.place_pattern for row in findings)
        return "timeout" if hangs else "error"
    if verdicts.get("suspect"):
        return "suspect"
    return "pass" if cases > verdicts.get("skipped", 0) else "skipped"


def _not_drawn(
    families: dict[str, int], axes: dict[str, int], plan: Plan, cases: int
) -> list[dict[str, str]]:
    """What could have been tried and was not."""
    found = []
    missing = [n for n in AXES if not axes.get(n)]
    if missing:
        found.append({
            "kernel": "*", "what": f"axes {', '.join(missing)}",
            "reason": "never departed from the baseline; name values with --axis, or use gdncheck sweep",
        })  # fmt: skip
    unseen = [f for f in FAMILIES if not families.get(f) and (not plan.families or f in plan.families)]
    if unseen:
        found.append({
            "kernel": "*", "what": f"families {', '.join(unseen)}", "reason": f"not drawn in {cases} cases",
        })  # fmt: skip
    return found


def rate_of(row: FindingRow) -> dict[str, Any] | None:
    """k of n in fresh processes, with the 95 % interval; None where it was not measured."""
    if not row.runs or row.failures is None:
        return None
    low, high = rate_interval(row.failures, row.runs)
    return {
        "failures": row.failures,
        "runs": row.runs,
        "rate": row.failures / row.runs,
        "interval": [low, high],
    }


def clean_words(report: FuzzReport) -> str:
    """What so many clean cases rule out."""
    if report.findings or not report.cases:
        return ""
    return f"a failure in more than {ruled_out(report.cases):.1e} of such cases is ruled out (95 %)"
