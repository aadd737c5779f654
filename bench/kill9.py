"""kill -9 at random moments over fuzz, sweep and shrink: what the store has after each.

    nice python bench/kill9.py [--kills 200]

Each run is a forked process with real workers, killed after a random time and resumed. After every kill: the
store opens and is whole, every finding is still there (under one name), no case of fuzz that was finished is
drawn again, no row of sweep is lost. At the end shrink is let finish from its journal. Results:
bench/results/kill9.json.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests" / "fuzz")]
import kill_child  # noqa: E402
from gdncheck.capture.casefile import read_case, write_case  # noqa: E402
from gdncheck.capture.make import make  # noqa: E402
from gdncheck.compare.shrink import shrink  # noqa: E402
from gdncheck.compare.store import FILE_NAME, RunStore  # noqa: E402
from gdncheck.compare.sweep.sweep import sweep  # noqa: E402
from gdncheck.kernels.pool import WorkerPool  # noqa: E402
from record import save  # noqa: E402

KERNEL = "fuzz_kernels:long"


def killed(run: Callable[[], None], seconds: float) -> bool:
    """Whether it was still running when it was killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def store_faults(directory: Path, known: set[str], rows: int) -> tuple[list[str], set[str], int]:
    """What is wrong with a run's store, its findings, and its number of rows."""
    if not (directory / FILE_NAME).exists():
        return [], known, rows
    connection = sqlite3.connect(directory / FILE_NAME)
    if connection.execute("PRAGMA integrity_check").fetchone() != ("ok",):
        return ["the store is broken"], known, rows
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    if "cases" not in tables:
        return [], known, rows
    faults = []
    counted = "SELECT (SELECT count(*) FROM cases) + (SELECT count(*) FROM results)"
    (now,) = connection.execute(counted).fetchone()
    in_flight = "SELECT count(*) FROM cases WHERE verdict IN ('alone', 'started')"
    (flying,) = connection.execute(in_flight).fetchone()
    aliases = dict(connection.execute("SELECT raw, signature FROM aliases"))
    connection.close()
    if now < rows:
        faults.append(f"{rows - now} rows are lost")
    if flying > 1:
        faults.append(f"{flying} cases were in flight")
    with RunStore.read(directory) as store:
        found = store.finding_rows()
        for row in found:
            if row.case_file is not None:
                read_case(store.case_path(row.case_file))
    names = {row.signature for row in found}
    lost = [name for name in known if name not in names and aliases.get(name) not in names]
    faults += [f"finding {name} is lost" for name in lost]
    return faults, names, now


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    given = parser.parse_args()
    dice = random.Random(9)
    faults: list[str] = []
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        case = make("qwen", lengths=[90, 4], k_heads=1, v_heads=2, dims=(16, 16), state="random", seed=2)
        write_case(case, place / "case.safetensors")
        fuzzed, swept, small = place / "f" / "run", place / "sweep", place / "small.safetensors"
        fuzzed.parent.mkdir()

        def run_fuzz() -> None:
            kill_child.run(fuzzed, WorkerPool, resume=(fuzzed / FILE_NAME).exists(), seconds=600.0)

        def run_sweep() -> None:
            sweep(
                place / "case.safetensors", kernels=[KERNEL], device="cpu", out=swept,
                resume=(swept / FILE_NAME).exists(), only=["split", "state", "state_dtype"],
            )  # fmt: skip

        def run_shrink() -> None:
            shrink(place / "case.safetensors", KERNEL, device="cpu", out=small, budget=600.0)

        runs = {"fuzz": run_fuzz, "sweep": run_sweep, "shrink": run_shrink}
        state = {"fuzz": (set[str](), 0), "sweep": (set[str](), 0)}
        for number in range(given.kills):
            name = ("fuzz", "fuzz", "sweep", "shrink")[number % 4]
            counts[f"{name}: killed" if killed(runs[name], dice.uniform(0.3, 9.0)) else f"{name}: ended"] += 1
            if name in state:
                directory = fuzzed if name == "fuzz" else swept
                wrong, names, rows = store_faults(directory, *state[name])
                state[name] = (names, rows)
                faults += [f"kill {number}, {name}: {words}" for words in wrong]
            elif small.exists() and read_case(small).n_tokens > case.n_tokens:
                faults.append(f"kill {number}, shrink: the best so far is larger than the start")
            if number % 10 == 9:
                kept = {n: (len(names), rows) for n, (names, rows) in state.items()}
                print(number + 1, dict(counts), kept, faults, flush=True)
        drawn = Counter(int(n) for n in (fuzzed.parent / "calls.log").read_text().split())
        twice = sorted(n for n, count in drawn.items() if count > 1)
        shrunk = shrink(place / "case.safetensors", KERNEL, device="cpu", out=small, budget=120.0)
        numbers = {
            "kills": given.kills, "counts": dict(counts), "faults": faults, "cases_run_twice": twice,
            "cases": len(drawn), "findings": {n: len(s) for n, (s, _) in state.items()},
            "shrunk_to": shrunk.words,
        }  # fmt: skip
    save("kill9", __file__, numbers)
    print(numbers)


if __name__ == "__main__":
    main()
