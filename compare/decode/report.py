"""A decode run on a terminal and as JSON: one line per kernel and profile, the drift at each checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..jsonout import SCHEMA, place, plain_numbers
from ..report import STYLES
from ..report_words import number
from .drift import DecodeReport, Drift


def print_report(report: DecodeReport, console: Console) -> None:
    """Print a decode run. Nothing else is printed on stdout by the command."""
    how = "one call per checkpoint" if report.whole else "one call per token"
    sequences = "1 sequence" if report.sequences == 1 else f"{report.sequences} sequences"
    console.print(
        escape(f"{report.case}: {report.steps} steps, {sequences}, {report.heads} heads, {how}"),
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print(table_of(report))
    for drift in report.drifts:
        for line in lines_of(drift):
            console.print(line, highlight=False, soft_wrap=True)
    status = f"[{STYLES[report.verdict]}]{report.verdict}[/]"
    console.print(
        f"{status} in {report.seconds:.1f} s; again: {escape(report.command)}",
        highlight=False,
        soft_wrap=True,
    )


def table_of(report: DecodeReport) -> Table:
    """The state's relative error against the pure recurrence at every checkpoint."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("kernel", "rounds", "verdict"):
        table.add_column(name, no_wrap=True)
    steps = next((tuple(p.step for p in d.points) for d in report.drifts if d.points), ())
    for step in steps:
        table.add_column(f"step {step}" if step == steps[0] else str(step), justify="right", no_wrap=True)
    for name in ("honest", "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for drift in report.drifts:
        last = drift.points[-1] if drift.points else None
        cells = [
            escape(drift.kernel),
            drift.profile.text,
            f"[{STYLES[drift.verdict]}]{drift.verdict}[/]",
            *(number(p.pure) for p in drift.points),
            *("" for _ in range(len(steps) - len(drift.points))),
            number(last.honest if last else None),
            number(last.bound if last else None),
        ]
        table.add_row(*cells)
    return table


def lines_of(drift: Drift) -> Iterator[str]:
    """Why: one sentence."""
    yield (
        f"[{STYLES[drift.verdict]}]{escape(drift.kernel)}[/] ({escape(drift.profile.text)}): "
        f"{escape(drift.ruling.reason)}"
    )


def document(report: DecodeReport) -> dict[str, Any]:
    """The run as plain data, schema 1."""
    body = {
        "schema": SCHEMA,
        "verdict": report.verdict,
        "case": report.case,
        "steps": report.steps,
        "sequences": report.sequences,
        "heads": report.heads,
        "whole": report.whole,
        "results": [
            {
                "kernel": d.kernel,
                "profile": msgspec.to_builtins(d.profile),
                "verdict": d.verdict,
                "tier": d.ruling.tier,
                "rule": d.ruling.rule,
                "reason": d.ruling.reason,
                "contract_differences": [msgspec.to_builtins(c) for c in d.ruling.contract_differences],
                "first_nonfinite": place(d.ruling.first_nonfinite),
                "worst_tile": place(d.ruling.worst_tile),
                "points": [msgspec.to_builtins(p) for p in d.points],
                "seconds": d.seconds,
                "evidence": msgspec.to_builtins(d.evidence, enc_hook=repr),
            }
            for d in report.drifts
        ],
        "seconds": report.seconds,
        "command": report.command,
    }
    plain = plain_numbers(body)
    assert isinstance(plain, dict)
    return plain


def dumps(report: DecodeReport) -> str:
    """One JSON document."""
    return json.dumps(document(report), indent=2, allow_nan=False)
