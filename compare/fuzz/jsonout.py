"""The JSON of a fuzz run: the keys that scripts may rely on (design section 6), schema 1."""

from __future__ import annotations

import json
from typing import Any

from ..jsonout import SCHEMA, plain_numbers
from ..store import FindingRow
from .report import FuzzReport, rate_of


def document(report: FuzzReport) -> dict[str, Any]:
    """The run as plain data."""
    plain = plain_numbers({
        "schema": SCHEMA,
        "verdict": report.verdict,
        "cases": report.cases,
        "findings": [_finding(row) for row in report.findings],
        "corpus": report.corpus,
        "kernels": report.per_kernel,
        "axes": report.per_axis,
        "families": report.per_family,
        "verdicts": report.per_verdict,
        "survived": report.survived,
        "interrupted": report.interrupted,
        "not_covered": list(report.not_covered),
        "stopped": report.stopped,
        "seconds": report.seconds,
        "spent": report.spent,
        "directory": report.directory,
        "command": report.command,
    })  # fmt: skip
    assert isinstance(plain, dict)
    return plain


def dumps(report: FuzzReport) -> str:
    """One JSON document."""
    return json.dumps(document(report), indent=2, allow_nan=False)


def _finding(row: FindingRow) -> dict[str, Any]:
    attempt = row.document.get("attempt", {})
    return {
        "signature": row.signature,
        "kernel": row.kernel,
        "verdict": attempt.get("verdict"),
        "tier": row.tier,
        "class": row.class_,
        "stage": row.stage,
        "deviations": row.deviations,
        "place_pattern": row.place_pattern,
        "place": attempt.get("place"),
        "reason": attempt.get("reason"),
        "rate": rate_of(row),
        "times": row.times,
        "status": row.status,
        "case": row.shrunk_file or row.case_file,
        "first_case": row.case_file,
        "neighbour": row.neighbour_file,
        "number": row.number,
    }
