"""A million cases by simulation: memory flat, the store below 1 GB, a resume in less than 5 s.

    nice python bench/fuzz_million.py [--cases 1000000]

What is simulated is the kernel and the verdict: every case is drawn, its recipe kept, its row written before
and after, its feedback taken, the corpus grown, all by the code of a real run. Nothing is computed on
tensors. Results: bench/results/fuzz-million.json.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench")]
from gdncheck.compare.fuzz.deviations import Axes  # noqa: E402
from gdncheck.compare.fuzz.dice import Dice  # noqa: E402
from gdncheck.compare.fuzz.feedback import FEATURES  # noqa: E402
from gdncheck.compare.fuzz.flight import Job  # noqa: E402
from gdncheck.compare.fuzz.generators.generator import Limits, Surroundings  # noqa: E402
from gdncheck.compare.fuzz.generators.table import draw_recipe  # noqa: E402
from gdncheck.compare.fuzz.journal import Journal, Row  # noqa: E402
from gdncheck.compare.fuzz.lanes import LANES, Numbers  # noqa: E402
from gdncheck.compare.fuzz.stock import Stockroom, shape_of  # noqa: E402
from gdncheck.compare.store import FILE_NAME, RunStore  # noqa: E402
from record import save  # noqa: E402

FAMILIES = ("qwen", "parallel-keys", "no-decay", "tiny-decay")
BATCH = 32


def simulated(number: int) -> dict[str, float]:
    """Feedback of a case, as spread out as real ones are."""
    dice = random.Random(number)
    return {name: dice.lognormvariate(0.0, 1.5) for name in FEATURES}


def resident() -> float:
    """MB of this process that are in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def fill(run: Path, cases: int) -> list[dict]:
    """Draw and note so many cases; memory, size and rate as it goes."""
    marks = []
    stock = Stockroom(0, [shape_of("1x2x16x16:bf16")], 128)
    limits = Limits(max_tokens=128, families=FAMILIES)
    axes = Axes({})
    with RunStore.open(run, parameters={"what": "fuzz", "kernels": ["simulated"]}, resume=False) as store:
        journal = Journal(store)
        numbers = Numbers(journal, 0, range(LANES), cases)
        done, started = 0, time.perf_counter()
        while taken := numbers.take(BATCH):
            jobs = []
            for number in taken:
                dice = Dice(0, number)
                around = Surroundings(
                    stock=stock, limits=limits, corpus=numbers.lane(number).snapshot(number),
                    deviations=axes.draw, number=number,
                )  # fmt: skip
                recipe = draw_recipe(dice, around)
                jobs.append(Job(number=number, recipe=recipe, setup=None, config={}))
            journal.start(0, jobs)
            with store.transaction():
                for job in jobs:
                    found = simulated(job.number)
                    journal.finish(0, job.number, "pass", seconds=0.001, feedback=found)
                    numbers.finish(Row(number=job.number, verdict="pass", recipe=job.recipe, feedback=found))
                journal.count({"cases": len(jobs), "verdict.pass": len(jobs)})
            done += len(taken)
            if done % 50_000 < BATCH or done == cases:
                marks.append({
                    "cases": done, "resident_mb": resident(), "seconds": time.perf_counter() - started,
                    "corpus": store.execute("SELECT count(*) FROM corpus").fetchone()[0],
                })  # fmt: skip
                print(marks[-1], flush=True)
    return marks


def resume(run: Path) -> float:
    """Seconds until the next numbers are known."""
    started = time.perf_counter()
    with RunStore.open(run, parameters={"what": "fuzz", "kernels": ["simulated"]}, resume=True) as store:
        Numbers(Journal(store), 0, range(LANES), None).take(BATCH)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=1_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        marks = fill(run, given.cases)
        size = sum(path.stat().st_size for path in run.glob(f"{FILE_NAME}*")) / 1e6
        numbers = {
            "cases": given.cases,
            "store_mb": size,
            "resume_seconds": resume(run),
            "resident_mb": {"first": marks[0]["resident_mb"], "last": marks[-1]["resident_mb"]},
            "marks": marks,
        }
    save("fuzz-million", __file__, numbers)
    print({name: value for name, value in numbers.items() if name != "marks"})


if __name__ == "__main__":
    main()
