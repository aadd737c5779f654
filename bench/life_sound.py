"""Sound bookkeepers over many thousand steps, and planted ones until they are found.

usage: python bench/life_sound.py [--steps 20000] [--seed 1] [--processes 2] [--name life-sound]

The one idea: histories are a function of (seed, number), so the same ones go through the two sound
bookkeepers, which must stay silent over every step, and through each planted fault, which must be found
within one history of 200 steps and shrunk to six steps or fewer. Every step is judged by the ledger and
against each sequence's own truth. What is written: how many steps were silent, the largest error in units of
the honest one, and for each fault the steps until it was found and the length of its shortest history.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
from gdncheck.compare.life.draw import draw_history
from gdncheck.compare.life.life import LEDGER_RULES, REFERENCE_RUNS, make_bookkeeper, shortest
from gdncheck.compare.life.machine import Reference
from gdncheck.compare.life.planted import PLANTED
from gdncheck.compare.life.run import run_history
from gdncheck.compare.life.tokens import Sizes
from record import machine, save, versions

STEPS = 200
SOUND = ("sound", "sound-clears")
PLANTED_HISTORIES = 10


def sound(job: tuple[str, int, int]) -> dict[str, Any]:
    """One history through a sound bookkeeper."""
    torch.set_num_threads(1)
    name, seed, number = job
    started = time.time()
    told = run_history(
        draw_history(seed, number, STEPS), Reference(Sizes()), make_bookkeeper(name), most_runs=REFERENCE_RUNS
    )
    return {
        "bookkeeper": name, "number": number, "steps": told.steps, "calls": told.calls, "tokens": told.tokens,
        "padded": told.padded, "ratio": told.worst_ratio, "seconds": time.time() - started,
        "failure": None if told.failure is None else told.failure.line,
    }  # fmt: skip


def planted(job: tuple[str, int, int]) -> dict[str, Any]:
    """One history through a planted bookkeeper, shrunk."""
    torch.set_num_threads(1)
    name, seed, number = job
    bookkeeper, reference = make_bookkeeper(f"planted:{name}"), Reference(Sizes())
    drawn = draw_history(seed, number, STEPS)
    told = run_history(drawn, reference, bookkeeper, most_runs=REFERENCE_RUNS)
    if told.failure is None:
        return {"fault": name, "number": number, "found_at": None}
    options = {"most_runs": REFERENCE_RUNS}
    short, again = shortest(drawn, told.failure, reference, bookkeeper, options, None)
    return {
        "fault": name, "number": number, "found_at": told.failure.step, "shrunk_to": len(short.steps),
        "rule": again.rule, "by_ledger": again.rule in LEDGER_RULES, "line": again.line,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="steps of each sound bookkeeper")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--name", help="also write bench/results/NAME.json")
    chosen = parser.parse_args()
    count = -(-chosen.steps // STEPS)
    jobs = [(name, chosen.seed, n) for name in SOUND for n in range(count)]
    faults = [(name, chosen.seed, n) for name in PLANTED for n in range(PLANTED_HISTORIES)]
    with ProcessPoolExecutor(chosen.processes) as workers:
        found = list(workers.map(planted, faults))
        print(json.dumps(found[:3]), flush=True)
        runs = list(workers.map(sound, jobs))
    result = {
        "versions": versions(), "machine": machine(), "seed": chosen.seed, "steps_per_history": STEPS,
        "sound": {name: summary([r for r in runs if r["bookkeeper"] == name]) for name in SOUND},
        "planted": {name: fault_summary([f for f in found if f["fault"] == name]) for name in PLANTED},
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    if chosen.name:
        save(chosen.name, __file__, result)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "histories": len(runs), "steps": sum(r["steps"] for r in runs),
        "calls": sum(r["calls"] for r in runs),
        "tokens": sum(r["tokens"] for r in runs), "padded_rows": sum(r["padded"] for r in runs),
        "alarms": [r["failure"] for r in runs if r["failure"] is not None],
        "largest_ratio": max(r["ratio"] for r in runs), "seconds": sum(r["seconds"] for r in runs),
    }  # fmt: skip


def fault_summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    seen = [f for f in found if f["found_at"] is not None]
    return {
        "histories": len(found), "found": len(seen),
        "steps_until_found": {
            "median": median(f["found_at"] for f in seen) if seen else None,
            "largest": max((f["found_at"] for f in seen), default=None),
        },
        "longest_shortest_history": max((f["shrunk_to"] for f in seen), default=None),
        "explained_by_the_ledger": sum(f["by_ledger"] for f in seen),
        "line": seen[0]["line"] if seen else None,
    }  # fmt: skip


if __name__ == "__main__":
    main()
