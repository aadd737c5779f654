"""The JSON document of a sweep: the keys that scripts may rely on (design section 6), schema 1, and more.

The idea: `first_nonfinite` and `first_wrong` are null or one configuration with its deviations and place;
all else (confirmation, neighbour, smallest input, what was not covered) stands beside them under other names.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ..jsonout import SCHEMA, place, plain_numbers
from .attempt import Attempt
from .explain import Finding
from .sweep import KernelSweep, SweepReport, first_of


def document(report: SweepReport) -> dict[str, Any]:
    """The sweep as plain data."""
    ran = [s for s in report.sweeps if not s.skipped]
    body = {
        "schema": SCHEMA,
        "verdict": report.verdict,
        "baseline": ran[0].baseline if ran else {},
        "tried": report.tried,
        "first_nonfinite": _first(report, "nonfinite"),
        "first_wrong": _first(report, "wrong"),
        "first_error": _first(report, "error"),
        "results": [_attempt(a) for s in report.sweeps for a in s.attempts],
        "kernels": [_kernel(s) for s in report.sweeps],
        "depth": report.depth,
        "seconds": report.seconds,
        "command": report.command,
    }
    plain = plain_numbers(body)
    assert isinstance(plain, dict)
    return plain


def dumps(report: SweepReport) -> str:
    """One JSON document."""
    return json.dumps(document(report), indent=2, allow_nan=False)


def _first(report: SweepReport, kind: str) -> dict[str, Any] | None:
    found = first_of(report, kind)
    return None if found is None else _finding(found[1])


def _finding(finding: Finding) -> dict[str, Any]:
    attempt, near = finding.attempt, finding.neighbour
    return {
        "config": attempt.config,
        "deviations": attempt.deviations,
        "place": place(attempt.place),
        "kernel": attempt.kernel,
        "case": attempt.case,
        "verdict": attempt.verdict,
        "tier": attempt.tier,
        "rule": attempt.rule,
        "reason": attempt.reason,
        "confirmed": finding.confirmed,
        "found_as": finding.found_as,
        "nearest_passing": None
        if near is None
        else {"config": near.config, "deviations": near.deviations, "change": finding.change},
        "smallest_tokens": finding.smallest_tokens,
        "smallest_is_exact": finding.smallest_is_exact,
        "work_around": list(finding.work_around),
        "cast_points": list(finding.cast_points),
        "not_reproduced": list(finding.not_reproduced),
        "own_sequences": list(attempt.own_sequences),
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(attempt, enc_hook=repr)
    return built


def _kernel(sweep: KernelSweep) -> dict[str, Any]:
    return {
        "kernel": sweep.kernel,
        "case": sweep.case,
        "layer": sweep.layer,
        "tokens": sweep.tokens,
        "baseline": sweep.baseline,
        "skipped": sweep.skipped or None,
        "findings": [{"kind": f.kind, **_finding(f)} for f in sweep.findings],
        "not_covered": list(sweep.not_covered),
        "untried": sweep.untried,
        "tuning": None if sweep.tuning is None else msgspec.to_builtins(sweep.tuning),
        "compile_failures": [
            {"deviations": a.deviations, "message": a.uncompiled} for a in sweep.attempts if a.uncompiled
        ],
        "seconds": sweep.seconds,
    }
