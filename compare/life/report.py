"""What `gdncheck life` prints and writes: a table, the ledger's line, the shortest history, and JSON.

The idea: the line of the ledger comes first, because it names the cause; what the numbers say of it follows;
then the steps that anyone can follow by hand.
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

from ..jsonout import SCHEMA, plain_numbers
from ..report import STYLES
from ..report_files import write_files
from ..report_words import number
from .life import LifeReport, LifeResult
from .steps import step_words, write_history


def print_report(report: LifeReport, console: Console) -> None:
    """Print the report of a run."""
    console.print(table_of(report))
    for result in report.results:
        for line in lines_of(result):
            console.print(escape(line), highlight=False, soft_wrap=True)
    again = f"; again: {escape(report.command)}" if report.command else ""
    word = f"[{STYLES[report.verdict]}]{report.verdict}[/]"
    console.print(f"{word} in {report.seconds:.1f} s{again}", highlight=False, soft_wrap=True)


def table_of(report: LifeReport) -> Table:
    """One row per kernel."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("kernel", no_wrap=True)
    table.add_column("bookkeeper", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name in ("steps", "calls", "tokens", "ratio", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in report.results:
        table.add_row(
            escape(r.kernel), escape(report.bookkeeper), f"[{STYLES[r.verdict]}]{r.verdict}[/]", str(r.steps),
            str(r.calls), str(r.tokens), number(r.ratio), f"{r.seconds:.1f} s",
        )  # fmt: skip
    return table


def lines_of(result: LifeResult) -> Iterator[str]:
    """The reason, what the numbers say, the shortest history."""
    yield f"{result.kernel}: {result.reason}"
    failure, history = result.failure, result.history
    if failure is not None and history is not None:
        for found in failure.found:
            yield f"  {found}"
        if result.verdict == "fail":
            drawn = "" if result.drawn is None else f" of {result.drawn.name}"
            yield f"  first seen at step {result.found_at}{drawn}; the shortest history that shows it:"
            for n, step in enumerate(history.steps, start=1):
                yield f"  {n:3d}  {step_words(step)}"
    for note in result.notes:
        yield f"  note: {note}"


def document(report: LifeReport) -> dict[str, Any]:
    """The report as plain data."""
    body = {
        "schema": SCHEMA,
        "verdict": report.verdict,
        "bookkeeper": report.bookkeeper,
        "seed": report.seed,
        "results": [_result(r) for r in report.results],
        "seconds": report.seconds,
        "command": report.command,
    }
    plain = plain_numbers(body)
    assert isinstance(plain, dict)
    return plain


def _result(result: LifeResult) -> dict[str, Any]:
    names = (
        "kernel",
        "verdict",
        "reason",
        "steps",
        "calls",
        "rows",
        "tokens",
        "histories",
        "ratio",
        "seconds",
    )
    return {
        **{name: getattr(result, name) for name in names},
        "failure": msgspec.to_builtins(result.failure),
        "found_at": result.found_at,
        "found_in": None if result.drawn is None else result.drawn.name,
        "history": msgspec.to_builtins(result.history),
        "notes": list(result.notes),
    }


def dumps(report: LifeReport) -> str:
    """One JSON document."""
    return json.dumps(document(report), indent=2, allow_nan=False)


def write_report(report: LifeReport, directory: Path) -> list[Path]:
    """report.json, report.txt, and the shortest history of every kernel that fails. Raises BadInput."""
    written = write_files(directory, dumps(report), lambda console: print_report(report, console))
    for result in report.results:
        if result.history is not None:
            path = directory / f"{result.kernel.replace('/', '_').replace(':', '_')}.history.json"
            write_history(result.history, path)
            written.append(path)
    return written
