"""The diff on a terminal: was the input sound, one table, why, what to do next, and the last line.

The idea: a person reads it top down and may stop at any line; the last line alone (verdict, time, the
command that repeats it) is enough to paste somewhere. All words come from the report's own values.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..capture.atomic import atomic_path
from .diff import CaseInput, DiffReport
from .jsonout import dumps
from .report_words import full, number
from .verdict import DiffResult, Outcome, Place

STYLES = {
    "pass": "green",
    "suspect": "yellow",
    "fail": "bold red",
    "error": "bold red",
    "timeout": "bold red",
    "out-of-contract": "magenta",
    "skipped": "dim",
}


def print_report(report: DiffReport, console: Console) -> None:
    """Print a diff. Nothing else is printed on stdout by the command."""
    for row in report.inputs:
        console.print(escape(input_line(row)), highlight=False, soft_wrap=True)
    console.print(table_of(report))
    for line in reasons(report):
        console.print(line, highlight=False, soft_wrap=True)
    for line in next_steps(report):
        console.print(escape(line), highlight=False, soft_wrap=True)
    console.print(last_line(report), highlight=False, soft_wrap=True)


def input_line(row: CaseInput) -> str:
    """One case: its size and whether its input is sound."""
    sequences = "1 sequence" if row.sequences == 1 else f"{row.sequences} sequences"
    size = f"{row.tokens} tokens, {sequences}, {row.heads} heads, {row.dtype}"
    sound = "input sound" if row.sound else row.reason
    remarks = "".join(f"; {remark}" for remark in row.remarks)
    return f"{row.case}: {size}: {sound}{remarks} (truth in {row.truth_seconds:.2f} s)"


def table_of(report: DiffReport) -> Table:
    """One row per result; a column for the case where there are several."""
    several = len(report.inputs) > 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    if several:
        table.add_column("case", no_wrap=True)
    table.add_column("kernel", no_wrap=True)
    for name in ("verdict", "rule"):
        table.add_column(name, no_wrap=True)
    for name in ("error o", "error S", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("first fault", overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    for result in report.results:
        ruling = result.ruling
        cells = [
            escape(result.kernel),
            f"[{STYLES[ruling.verdict]}]{verdict_word(result, report)}[/]",
            rule_of(result),
            number(ruling.error.get("output")),
            number(ruling.error.get("state")),
            number(ruling.ratio),
            escape(fault_of(result)),
            "-" if result.seconds is None else f"{result.seconds:.2f} s",
        ]
        table.add_row(*([escape(result.case.rsplit("/", 1)[-1])] if several else []), *cells)
    return table


def verdict_word(result: DiffResult, report: DiffReport) -> str:
    """A verdict reached by the caller's tolerance is marked."""
    return result.verdict + (
        " (by tolerance)" if report.tolerance and result.ruling.rule == "tolerance" else ""
    )


def rule_of(result: DiffResult) -> str:
    ruling = result.ruling
    if ruling.rule is None:
        return "-"
    return f"tier {ruling.tier}: {ruling.rule}" if ruling.tier is not None else ruling.rule


def fault_of(result: DiffResult) -> str:
    """The first non-finite place, else the worst tile."""
    place: Place | None = result.ruling.first_nonfinite or result.ruling.worst_tile
    return "-" if place is None else full(place)


def reasons(report: DiffReport) -> Iterator[str]:
    """One sentence per result, and the suspects and the relations that were not run below it."""
    for result in report.results:
        style = STYLES[result.verdict]
        case = f"{result.case.rsplit('/', 1)[-1]} " if len(report.inputs) > 1 else ""
        yield f"[{style}]{escape(case + result.kernel)}[/]: {escape(result.ruling.reason)}"
        for outcome in notes(result):
            yield f"  {escape(outcome.check)}: {escape(outcome.reason)}"
        tolerance = would_pass(result)
        if tolerance:
            yield f"  {escape(tolerance)}"


def notes(result: DiffResult) -> list[Outcome]:
    """Outcomes worth a line although they did not decide."""
    ruling = result.ruling
    return [
        o
        for o in ruling.outcomes
        if o.reason and o.reason not in ruling.reason and (o.status in ("fires", "suspect") or o.tier == 4)
    ]


def would_pass(result: DiffResult) -> str:
    """The tolerances that the firing checks would have needed."""
    parts = [
        f"{o.check}: " + ", ".join(f"{k} {number(v)}" for k, v in o.numbers["would_pass"].items())
        for o in result.ruling.outcomes
        if o.status == "fires" and o.numbers.get("would_pass")
    ]
    return f"would have passed with {'; '.join(parts)}" if parts else ""


def next_steps(report: DiffReport) -> Iterator[str]:
    """What to do next, at most a line per kind of verdict."""
    words = {r.verdict for r in report.results}
    if report.first_bad_layer is not None:
        layer = report.first_bad_layer
        yield f"first bad layer: {layer}; next: gdncheck diff --layer {layer}"
    if "out-of-contract" in words:
        yield "next: the input is to blame before any kernel; see what wrote it: gdncheck inspect CASE"
    if "fail" in words:
        yield "next: attach the case file and this report; compare another version on it with --kernel"
    if "timeout" in words:
        yield "next: give it longer with --time-limit SECONDS, or fewer tokens with --first N"
    if "error" in words:
        yield "next: the kernel did not answer; see gdncheck doctor for known-bad combinations"
    if "suspect" in words:
        yield "next: a suspect is no proof; run it again with another --seed and with --relations all"


def last_line(report: DiffReport) -> str:
    """Verdict, time, command."""
    style = STYLES[report.verdict]
    again = f"; again: {escape(report.command)}" if report.command else ""
    return f"[{style}]{report.verdict}[/] in {report.seconds:.1f} s{again}"


def write_report(report: DiffReport, directory: Path) -> tuple[Path, Path]:
    """report.json and report.txt in a directory, each whole or not at all. Raises BadInput."""
    text = StringIO()
    print_report(report, Console(file=text, width=140, no_color=True))
    written = []
    for name, content in (("report.json", dumps(report) + "\n"), ("report.txt", text.getvalue())):
        with atomic_path(directory / name) as temporary:
            temporary.write_text(content, encoding="utf-8")
        written.append(directory / name)
    return written[0], written[1]
