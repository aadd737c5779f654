"""Repeats on a terminal and as JSON: one row per series, why, what was compared, and the last line.

The idea: the document's own numbers are the worst series' (there is one, as a rule), under the keys that
design section 6 promises; every series stands in `results` with its kinds of answers and its processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .jsonout import SCHEMA, place, plain_numbers
from .repeat_result import RepeatReport, RepeatResult, series_name
from .repeat_verdict import Kind
from .report import STYLES
from .report_files import write_files
from .report_words import full, number
from .tunings import in_lines


def document(report: RepeatReport) -> dict[str, Any]:
    """The repeats as plain data."""
    body = {
        "schema": SCHEMA,
        "verdict": report.verdict,
        **_numbers(report.worst),
        "kernel": report.worst.kernel,
        "case": report.worst.case,
        "results": [_series(result) for result in report.results],
        "comparisons": [{"a": a, "b": b, **msgspec.to_builtins(found)} for a, b, found in report.comparisons],
        "tuning": msgspec.to_builtins(report.tuning),
        "seconds": report.seconds,
        "command": report.command,
    }
    plain = plain_numbers(body)
    assert isinstance(plain, dict)
    return plain


def dumps(report: RepeatReport) -> str:
    """One JSON document."""
    return json.dumps(document(report), indent=2, allow_nan=False)


def _numbers(result: RepeatResult) -> dict[str, Any]:
    """The keys that scripts may rely on."""
    return {
        "runs": result.runs,
        "failures": result.failures,
        "rate": result.rate,
        "interval": list(result.interval),
        "confidence": result.confidence,
        "distinct_outputs": result.distinct_outputs,
        "runs_needed": msgspec.to_builtins(result.still_needed),
    }


def _series(result: RepeatResult) -> dict[str, Any]:
    return {
        "kernel": result.kernel,
        "case": result.case,
        "layer": result.layer,
        "configuration": result.configuration,
        "verdict": result.verdict,
        "tier": result.tier,
        "rule": result.rule,
        "reason": result.reason,
        "place": place(result.place),
        **_numbers(result),
        "ruled_out": result.ruled_out,
        "clean_runs_needed": msgspec.to_builtins(result.runs_needed),
        "outputs": [_kind(kind) for kind in result.kinds],
        "processes": list(_processes(result)),
        "launched": list(result.launched),
    }


def _kind(kind: Kind) -> dict[str, Any]:
    moved = None if kind.moved is None else kind.moved
    return {
        "runs": kind.runs,
        "first_run": kind.first,
        "answered": kind.answered,
        "verdict": kind.ruling.verdict,
        "tier": kind.ruling.tier,
        "rule": kind.ruling.rule,
        "reason": kind.ruling.reason,
        "place": place(kind.place),
        "error": kind.ruling.error,
        "differs_at": place(None if moved is None else moved.place),
        "beyond_rounding": None if moved is None else moved.status == "fires",
    }


def _processes(result: RepeatResult) -> Iterator[dict[str, Any]]:
    """Each process: its runs, how many failed, which answer its first call gave and which its others."""
    for process in sorted({run.process for run in result.all_runs}):
        runs = [run for run in result.all_runs if run.process == process]
        warm = {run.kind for run in runs if not run.cold}
        cold = [run.kind for run in runs if run.cold]
        yield {
            "process": process,
            "runs": len(runs),
            "failures": sum(result.kinds[run.kind].failed for run in runs),
            "first_call": cold[0] if cold else None,
            "warm": sorted(warm),
            "first_differs": bool(warm and cold and cold[0] not in warm),
            "beside_busy_stream": sum(run.busy for run in runs),
        }


def print_report(report: RepeatReport, console: Console) -> None:
    """Print repeats. Nothing else is printed on stdout by the command."""
    console.print(table_of(report))
    for result in report.results:
        style = STYLES[result.verdict]
        name = escape(f"{result.case.rsplit('/', 1)[-1]} {series_name(result)}")
        console.print(f"[{style}]{name}[/]: {escape(result.reason)}", highlight=False, soft_wrap=True)
        for line in _lines(result):
            console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
    for a, b, found in report.comparisons:
        line = (
            f"{a} ({number(found.rate_a)}) against {b} ({number(found.rate_b)}): Fisher's exact test, "
            f"two-sided, p = {number(found.p_value)}"
        )
        console.print(escape(line), highlight=False, soft_wrap=True)
    for account in report.tuning:
        console.print(f"tuners of {escape(account.kernel)}", highlight=False, soft_wrap=True)
        for line in in_lines(account):
            console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
    console.print(last_line(report), highlight=False, soft_wrap=True)


def table_of(report: RepeatReport) -> Table:
    """One row per series."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("case", "kernel", "verdict"):
        table.add_column(name, no_wrap=True)
    for name in ("runs", "failures", "rate", "interval", "outputs", "median time"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in report.results:
        low, high = result.interval
        seconds = sorted(run.seconds for run in result.all_runs if run.seconds is not None)
        table.add_row(
            escape(result.case.rsplit("/", 1)[-1]),
            escape(series_name(result)),
            f"[{STYLES[result.verdict]}]{result.verdict}[/]",
            str(result.runs),
            str(result.failures),
            number(result.rate),
            f"{low:.3g} to {high:.3g}",
            str(result.distinct_outputs),
            "-" if not seconds else f"{seconds[len(seconds) // 2]:.3g} s",
        )
    return table


def _lines(result: RepeatResult) -> Iterator[str]:
    """What else is worth a line: the kinds of answers, company, and how many runs are missing."""
    if len(result.kinds) > 1:
        for index, kind in enumerate(result.kinds):
            at = "" if kind.place is None else f", {full(kind.place)}"
            yield f"answer {index}: {kind.runs} runs, first run {kind.first}, {kind.ruling.verdict}{at}"
    n_processes = len({run.process for run in result.all_runs})
    busy = sum(run.busy for run in result.all_runs)
    company = f", {busy} of them beside a busy stream" if busy else ""
    if len(result.launched) > 1:
        yield f"{len(result.launched)} different sets of tuned configurations were launched"
    if result.verdict != "skipped":
        yield f"{result.runs} runs in {n_processes} process{'es' if n_processes > 1 else ''}{company}"
        needed = result.still_needed
        if result.failures:
            yield f"once mended, {needed.runs} clean runs rule out the rate that was seen (one-sided)"
        elif needed.runs:
            yield f"{needed.runs} more clean runs would rule out a rate of {needed.rate:g} (one-sided)"


def last_line(report: RepeatReport) -> str:
    """Verdict, time, the command that repeats it."""
    style = STYLES[report.verdict]
    again = f"; again: {escape(report.command)}" if report.command else ""
    return f"[{style}]{report.verdict}[/] in {report.seconds:.1f} s{again}"


def write_report(report: RepeatReport, folder: Path) -> None:
    """report.json and report.txt, each whole or not at all."""
    write_files(folder, dumps(report), lambda console: print_report(report, console))
