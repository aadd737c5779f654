"""The JSON document of a diff: the keys that scripts may rely on (design section 6), schema 1.

The idea: JSON has no NaN and no infinity, so non-finite numbers become the strings "nan", "inf", "-inf", and
everything else is the report's own values under their documented names.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import msgspec

from .verdict import DiffResult, Place

if TYPE_CHECKING:
    from .diff import DiffReport

SCHEMA = 1


def document(report: DiffReport) -> dict[str, Any]:
    """The diff as plain data."""
    body = {
        "schema": SCHEMA,
        "verdict": report.verdict,
        "results": [_result(r) for r in report.results],
        "input": [msgspec.to_builtins(s) for s in report.inputs],
        "first_bad_layer": report.first_bad_layer,
        "tolerance": msgspec.to_builtins(report.tolerance),
        "pairs": [msgspec.to_builtins(p) for p in report.pairs],
        "seconds": report.seconds,
        "command": report.command,
    }
    plain = plain_numbers(body)
    assert isinstance(plain, dict)
    return plain


def dumps(report: DiffReport) -> str:
    """One JSON document."""
    return json.dumps(document(report), indent=2, allow_nan=False)


def place(value: Place | None) -> dict[str, Any] | None:
    """A place with its absent parts null."""
    if value is None:
        return None
    built: dict[str, Any] = msgspec.to_builtins(value)
    return built


def _result(result: DiffResult) -> dict[str, Any]:
    ruling = result.ruling
    return {
        "kernel": result.kernel,
        "case": result.case,
        "layer": result.layer,
        "verdict": ruling.verdict,
        "tier": ruling.tier,
        "rule": ruling.rule,
        "reason": ruling.reason,
        "contract_differences": [msgspec.to_builtins(d) for d in ruling.contract_differences],
        "first_nonfinite": place(ruling.first_nonfinite),
        "worst_tile": place(ruling.worst_tile),
        "error": {"output": None, "state": None, **ruling.error},
        "error_pure": {"output": None, "state": None, **ruling.error_pure},
        "ratio": ruling.ratio,
        "by_tolerance": list(ruling.by_tolerance),
        "hypothesis": msgspec.to_builtins(ruling.hypothesis),
        "stages": [msgspec.to_builtins(s) for s in result.stages],
        "stages_note": result.stages_note or None,
        "ops": [msgspec.to_builtins(o) for o in result.ops],
        "seconds": result.seconds,
        "checks": [msgspec.to_builtins(o) for o in ruling.outcomes],
        "evidence": _plain_evidence(result.evidence),
    }


def _plain_evidence(evidence: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(evidence, enc_hook=repr)
    return plain


def plain_numbers(value: Any) -> Any:
    """Replace non-finite floats by strings, all the way down."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {str(k): plain_numbers(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(v) for v in value]
    return value
