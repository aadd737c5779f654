"""Sound bookkeepers over many thousand steps, and planted ones until they are found.

usage: python bench/life_sound.py [--steps 20000] [--seed 1] [--processes 2] [--seconds 600] [--log FILE]
                                  [--name life-sound]

The one idea: histories are a function of (seed, number), so the same ones go through the two sound
bookkeepers, which must stay silent over every step, and through each planted fault, which must be found
within one history of 200 steps and shrunk to six steps or fewer. Every step is judged by the ledger and
against each sequence's own truth. What is written: how many steps were silent, the largest error in units of
the honest one, and for each fault the steps until it was found and the length of its shortest history.
With --log a run that was ended goes on where it stopped.
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
PLANTED_HISTORIES = 3


def one(job: tuple[str, str, int, int], until: float) -> dict[str, Any] | None:
    """One line of the log; None where the time is up."""
    if time.time() > until:
        return None
    torch.set_num_threads(1)
    kind, name, seed, number = job
    found = sound(name, seed, number) if kind == "sound" else planted(name, seed, number)
    return {"job": job, **found}


def sound(name: str, seed: int, number: int) -> dict[str, Any]:
    """One history through a sound bookkeeper."""
    started = time.time()
    told = run_history(
        draw_history(seed, number, STEPS), Reference(Sizes()), make_bookkeeper(name), most_runs=REFERENCE_RUNS
    )
    return {
        "bookkeeper": name, "number": number, "steps": told.steps, "calls": told.calls, "tokens": told.tokens,
        "padded": told.padded, "ratio": told.worst_ratio, "seconds": time.time() - started,
        "failure": None if told.failure is None else told.failure.line,
    }  # fmt: skip


def planted(name: str, seed: int, number: int) -> dict[str, Any]:
    """One history through a planted bookkeeper, shrunk."""
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
    parser.add_argument("--seconds", type=float, default=3600.0, help="start nothing after so long")
    parser.add_argument("--log", type=Path, default=Path("life_sound.jsonl"), help="what is done already")
    parser.add_argument("--name", help="also write bench/results/NAME.json")
    chosen = parser.parse_args()
    count = -(-chosen.steps // STEPS)
    faults = [["planted", name, chosen.seed, n] for name in PLANTED for n in range(PLANTED_HISTORIES)]
    jobs = faults + [["sound", name, chosen.seed, n] for n in range(count) for name in SOUND]
    done = [json.loads(line) for line in chosen.log.read_text().splitlines()] if chosen.log.exists() else []
    known = [line["job"] for line in done]
    left = [job for job in jobs if job not in known]
    until = time.time() + chosen.seconds
    with ProcessPoolExecutor(chosen.processes) as workers, chosen.log.open("a") as log:
        for line in workers.map(one, left, [until] * len(left)):
            if line is not None:
                done.append(line)
                log.write(json.dumps(line) + "\n")
                log.flush()
    found = [line for line in done if line["job"][0] == "planted"]
    runs = [line for line in done if line["job"][0] == "sound"]
    result = {
        "versions": versions(), "machine": machine(), "seed": chosen.seed, "steps_per_history": STEPS,
        "complete": len(done) == len(jobs),
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
        "largest_ratio": max((r["ratio"] for r in runs), default=None),
        "seconds": sum(r["seconds"] for r in runs),
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
