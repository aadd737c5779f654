"""The table of a matrix run, made from its logs: counts by verdict, contract differences, every departure.

The idea: the logs are all there is, so a run that was cut gives the same table over fewer rows.
Leaves to others: judging (`matrix`).
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from side_by_side import lines_of

PHASES = ("exact", "relations", "empty", "seeded")
ALARMS = ("fail", "suspect", "error", "timeout", "out-of-contract", "judge failed", "cannot run")


def summarise(folder: Path) -> dict[str, Any]:
    """Everything that a run found, by kernel, with the facts of the machine that it ran on."""
    facts = json.loads((folder / "run.json").read_text())
    kernels = {log.stem: _kernel(lines_of(log)) for log in sorted(folder.glob("*.jsonl"))}
    return {"run": facts, "kernels": kernels}


def _kernel(lines: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [line for line in lines if line["phase"] in PHASES]
    differences: Counter[str] = Counter()
    silent: Counter[str] = Counter()
    for row in rows:
        differences.update({d["clause"] for d in row.get("contract_differences", [])})
        silent.update(row.get("silent", []))
    return {
        "environment": next((x["environment"] for x in lines if "environment" in x), None),
        "ended": lines[-1]["verdict"] if lines and lines[-1]["phase"] in ("open", "end") else "cut",
        "judged": len(rows),
        "verdicts": {phase: dict(_verdicts(rows, phase)) for phase in PHASES},
        "contract_differences": dict(differences),
        "silent_checks": dict(sorted(silent.items())),
        "slowest_seconds": max((row.get("took", 0.0) for row in rows), default=0.0),
        "first_call_seconds": next((row["seconds"] for row in rows if row.get("seconds")), None),
        "largest_ratio": max((row["ratio"] for row in rows if row.get("ratio") is not None), default=None),
        "refused": _counted(row["reason"] for row in rows if row["verdict"] == "skipped"),
        "departures": [row for row in lines if row["verdict"] in ALARMS],
        "worth_a_line": _remarks(rows),
    }


def _verdicts(rows: list[dict[str, Any]], phase: str) -> Counter[str]:
    return Counter(row["verdict"] for row in rows if row["phase"] == phase)


def _remarks(rows: list[dict[str, Any]]) -> dict[str, int]:
    """What passing rows said all the same: relations that lost bits as they may, or asked nothing."""
    said = (
        f"{o['check']} ({o['status']}): {o['reason']}"
        for row in rows
        if row["verdict"] == "pass"
        for o in row.get("outcomes", [])
    )
    return _counted(said)


def _counted(texts: Any) -> dict[str, int]:
    return dict(Counter(texts).most_common(12))


def print_table(found: dict[str, Any]) -> None:
    """One line per kernel, then every departure in full."""
    for name, kernel in found["kernels"].items():
        counts = "; ".join(
            f"{phase} " + ", ".join(f"{n} {verdict}" for verdict, n in sorted(verdicts.items()))
            for phase, verdicts in kernel["verdicts"].items()
            if verdicts
        )
        differences = ", ".join(f"{clause} x{n}" for clause, n in kernel["contract_differences"].items())
        print(f"{name} [{kernel['ended']}]: {counts or 'nothing judged'}")
        print(f"  contract differences: {differences or 'none'}; largest ratio {kernel['largest_ratio']}")
        for row in kernel["departures"]:
            print(f"  {row['verdict']}: {row.get('case', row['phase'])} {row.get('lengths', '')} "
                  f"by {row.get('rule')}: {row.get('reason')}")  # fmt: skip
    print(f"{sum(k['judged'] for k in found['kernels'].values())} judgements")
