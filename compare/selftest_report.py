"""The selftest on a terminal and as JSON: fault -> found by, the twin, and the last line."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .jsonout import SCHEMA, plain_numbers
from .report import STYLES
from .selftest import Line, SelftestReport


def document(report: SelftestReport) -> dict[str, Any]:
    """The selftest as plain data."""
    body = {
        "schema": SCHEMA,
        "verdict": report.verdict,
        "device": report.device,
        "planted": len(report.lines),
        "found": sum(line.found for line in report.lines),
        "results": [{"ok": line.ok, **msgspec.to_builtins(line)} for line in report.lines],
        "seconds": report.seconds,
        "command": report.command,
    }
    plain = plain_numbers(body)
    assert isinstance(plain, dict)
    return plain


def dumps(report: SelftestReport) -> str:
    """One JSON document."""
    return json.dumps(document(report), indent=2, allow_nan=False)


def print_report(report: SelftestReport, console: Console) -> None:
    """Print the selftest. Nothing else is printed on stdout by the command."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stands for", "planted fault", "sound twin"):
        table.add_column(name, no_wrap=True)
    table.add_column("found by", overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    for line in report.lines:
        twin = "-" if line.skipped else "passes" if line.twin_sound else "[bold red]is blamed[/]"
        time = f"{line.seconds:.1f} s"
        table.add_row(escape(line.family), escape(line.fault), twin, _found_by(line), time)
    console.print(table)
    for line in report.lines:
        if not line.ok:
            console.print(escape(f"{line.fault}: {line.why}"), highlight=False, soft_wrap=True)
    console.print(last_line(report), highlight=False, soft_wrap=True)


def _found_by(line: Line) -> str:
    if line.found:
        return escape(line.found_by)
    return f"[dim]{escape(line.why)}[/]" if line.skipped else "[bold red]not found[/]"


def last_line(report: SelftestReport) -> str:
    """Verdict, time, the command that repeats it."""
    found = sum(line.found for line in report.lines)
    skipped = sum(line.skipped for line in report.lines)
    left = f", {skipped} skipped" if skipped else ""
    again = f"; again: {escape(report.command)}" if report.command else ""
    style = STYLES["fail" if report.exit_status else "pass"]
    return (
        f"[{style}]{report.verdict}[/]: {found} of {len(report.lines)} planted faults found on "
        f"{report.device}{left} in {report.seconds:.1f} s{again}"
    )
