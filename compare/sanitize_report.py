"""compute-sanitizer's findings on a terminal and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from .jsonout import SCHEMA, place, plain_numbers
from .report import STYLES
from .report_files import write_files
from .sanitize import Blamed, SanitizeReport, SanitizeResult, in_words


def document(report: SanitizeReport) -> dict[str, Any]:
    """The report as plain data."""
    body = {
        "schema": SCHEMA,
        "verdict": report.verdict,
        "results": [_result(result) for result in report.results],
        "seconds": report.seconds,
        "command": report.command,
    }
    plain = plain_numbers(body)
    assert isinstance(plain, dict)
    return plain


def dumps(report: SanitizeReport) -> str:
    """One JSON document."""
    return json.dumps(document(report), indent=2, allow_nan=False)


def _result(result: SanitizeResult) -> dict[str, Any]:
    return {
        "kernel": result.kernel,
        "case": result.case,
        "layer": result.layer,
        "tool": result.tool,
        "verdict": result.verdict,
        "reason": result.reason,
        "reported": result.reported,
        "findings": [_blamed(one) for one in result.blamed],
        "answer": {"verdict": result.answer, "reason": result.answer_reason},
        "launched": result.launched,
        "seconds": result.seconds,
    }


def _blamed(one: Blamed) -> dict[str, Any]:
    return {"stage": one.stage, "place": place(one.place), "fault": msgspec.to_builtins(one.fault)}


def print_report(report: SanitizeReport, console: Console) -> None:
    """Print it. Nothing else is printed on stdout by the command."""
    for result in report.results:
        style = STYLES[result.verdict]
        name = escape(f"{result.case.rsplit('/', 1)[-1]} {result.kernel} {result.tool}")
        console.print(f"{name}: [{style}]{result.verdict}[/]: {escape(result.reason)}", soft_wrap=True)
        for one in result.blamed:
            console.print(f"  {escape(in_words(one))}", highlight=False, soft_wrap=True)
            for line in one.fault.detail:
                console.print(f"    {escape(line)}", style="dim", highlight=False, soft_wrap=True)
        if result.answer is not None:
            line = f"  what it returned: {result.answer}: {result.answer_reason}"
            console.print(escape(line), highlight=False, soft_wrap=True)
    style = STYLES[report.verdict]
    again = f"; again: {escape(report.command)}" if report.command else ""
    console.print(
        f"[{style}]{report.verdict}[/] in {report.seconds:.1f} s{again}", highlight=False, soft_wrap=True
    )


def write_report(report: SanitizeReport, folder: Path) -> None:
    """report.json, report.txt and each tool's own log, each whole or not at all."""
    logs = {f"{n:02d}-{result.tool}.log": result.log for n, result in enumerate(report.results) if result.log}
    write_files(folder, dumps(report), lambda console: print_report(report, console), more=logs)
