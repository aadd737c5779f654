"""Judge recorded alarms of `specificity.py` again, in the arithmetic of the GPU they came from, without one.

The first run of 2026-12-01 judged H200 kernels on a CPU and measured them by a CPU's float32 dots (ieee)
instead of the GPU's (tf32). The outputs are gone, but a log line keeps the accused tile, its error over the
honest error and the case's number, from which the case and both honest errors follow:
new ratio = old ratio * honest error (ieee) / honest error (tf32).

usage: python bench/h200/rejudge.py LOG...    (the JSON lines of specificity.py)
Result: bench/results/h200-specificity.json: verdict counts of the logs and every alarm's new ratio.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from gdncheck.compare.witness import Witness
from honest_cases import case_number
from record import save

PROFILES = {"fla.chunk@0.4.0": "fla-0.4", "fla.chunk@0.6.0": "fla-0.6"}
CHUNK_SIZE = 64
LIMIT = 1.5
ALARM = re.compile(
    r"(output|state) is wrong at sequence (\d+), head (\d+)(?:, chunk (\d+))?(?:, token \d+)?: "
    r"RMS error is ([\d.e+]+) times"
)


def new_ratio(number: int, kernel: str, reason: str) -> float | None:
    """The accused tile's error over the GPU's honest error; None where the reason names no ratio."""
    found = ALARM.search(reason)
    if found is None:
        return None
    tensor, sequence, head, chunk, old = found.groups()
    witness = Witness(case_number(number, 0, one_shape=True), device="cpu")
    ieee, tf32 = (
        witness.yardstick(PROFILES[kernel], CHUNK_SIZE, device=device).of(tensor)
        for device in ("cpu", "cuda")
    )
    if tensor == "state":
        tile = int(sequence)
    else:
        tiles = witness.output_tiles(CHUNK_SIZE)
        tile = int(((tiles.sequence == int(sequence)) & (tiles.chunk == int(chunk))).nonzero()[0, 0])
    pool = int(tf32.pools.pool_of_tile[tile])
    return float(old) * float(ieee.rms[pool, int(head)]) / float(tf32.rms[pool, int(head)])


def rejudged(logs: list[Path]) -> tuple[Counter[str], int, list[dict[str, Any]]]:
    """Verdicts as logged, number of cases, and each alarm with its new ratio."""
    counts: Counter[str] = Counter()
    cases, alarms = 0, []
    for line in (json.loads(text) for log in logs for text in log.read_text().splitlines()):
        cases += 1
        for row in line["rows"]:
            counts[f"{row['kernel']} {row['verdict']}"] += 1
            if row["verdict"] in ("fail", "suspect"):
                alarms.append({
                    "case": line["case"], "family": line["family"], "dtype": line["dtype"],
                    "kernel": row["kernel"], "rule": row["rule"],
                    "ratio": new_ratio(line["case"], row["kernel"], row["reason"]), "was": row["reason"],
                })  # fmt: skip
    return counts, cases, alarms


def main() -> None:
    torch.set_num_threads(1)
    counts, cases, alarms = rejudged([Path(name) for name in sys.argv[1:]])
    ratios = [a["ratio"] for a in alarms if a["ratio"] is not None]
    above = [a for a in alarms if a["ratio"] is None or a["ratio"] > LIMIT]
    save("h200-specificity", __file__, {
        "cases": cases, "verdicts_as_logged": dict(sorted(counts.items())), "alarms": len(alarms),
        "largest_new_ratio": max(ratios, default=None), "not_explained": above,
        "rejudged": [{k: v for k, v in a.items() if k != "was"} for a in alarms],
    })  # fmt: skip
    print(f"{cases} cases; {len(alarms)} alarms, {len(above)} not explained; "
          f"largest new ratio {max(ratios, default=0):.3f} (limit {LIMIT})")  # fmt: skip


if __name__ == "__main__":
    main()
