"""The summary of a fuzz run in lines: findings first, then what was done, then what was not covered."""

from __future__ import annotations

from collections.abc import Iterator

from ..store import FindingRow
from ..sweep.configuration import in_words
from .report import FuzzReport, clean_words

STATUS_WORDS = {
    "found": "not confirmed yet: resume the run",
    "not-reproduced": "no fresh process shows it again",
    "confirmed": "confirmed",
    "to-shrink": "confirmed, not shrunk",
    "shrunk": "confirmed and shrunk",
}
STOPPED_WORDS = {"time": "the time was up", "cases": "all cases were run", "interrupted": "interrupted"}


def lines(report: FuzzReport) -> Iterator[str]:
    """The whole summary."""
    for row in report.findings:
        yield from finding_lines(row, report.directory)
        yield ""
    yield from _done(report)
    yield from _not_covered(report)
    words = clean_words(report)
    if words:
        yield words
    yield _last(report)


def finding_lines(row: FindingRow, directory: str | None) -> Iterator[str]:
    """A finding: what, where, how often, and which file shows it."""
    attempt = row.document.get("attempt", {})
    what = row.class_ if row.class_ == "error" else f"{row.class_} {row.stage or ''}".strip()
    yield f"finding {row.signature}  {row.kernel}: {what}, {row.place_pattern}"
    yield f"  {attempt.get('reason', '')}"
    rate = "" if row.runs is None else f"; {row.failures} of {row.runs} runs in fresh processes"
    low_high = row.document.get("interval")
    if rate and low_high and row.failures != row.runs:
        rate += f" (95 %: {low_high[0]:.1%} to {low_high[1]:.1%})"
    yield f"  under {in_words(row.deviations)}; seen {row.times} times{rate}; {STATUS_WORDS[row.status]}"
    if directory is not None:
        yield f"  {directory}/{row.shrunk_file or row.case_file}"


def _done(report: FuzzReport) -> Iterator[str]:
    each = ", ".join(f"{name} {n:,}" for name, n in report.per_kernel.items())
    words = ", ".join(f"{n:,} {name}" for name, n in report.per_verdict.items())
    yield f"{report.cases:,} cases ({each}): {words or 'none judged'}"
    if report.per_axis:
        yield "axes: " + ", ".join(f"{name} {n:,}" for name, n in report.per_axis.items())
    total = sum(report.spent.values()) or 1.0
    shares = ", ".join(f"{name} {100 * s / total:.0f} %" for name, s in report.spent.items())
    yield f"corpus {report.corpus:,}; time: {shares}; {report.survived} calls that failed were survived"


def _not_covered(report: FuzzReport) -> Iterator[str]:
    if report.interrupted:
        yield (
            f"not covered: {report.interrupted} cases were in flight when the run died, and are not run "
            "again (verdict interrupted in the store)"
        )
    for row in report.not_covered:
        who = "" if row["kernel"] == "*" else f"{row['kernel']}: "
        yield f"not covered: {who}{row['what']}: {row['reason']}"


def _last(report: FuzzReport) -> str:
    n = len(report.findings)
    found = f"{n} finding{'s' if n != 1 else ''}" if n else "no finding"
    return (
        f"{report.verdict}: {found}, {report.seconds:.1f} s, {STOPPED_WORDS[report.stopped]}"
        f"{f'; {report.command}' if report.command else ''}"
    )
