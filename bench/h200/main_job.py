"""The main job at the real layer's size on one GPU: FLA's versions against the float64 truth.

A synthetic case of T = 11,686 tokens, 16 key and 32 value heads, 128 x 128, bf16, with an initial state.
Prints and records the verdicts of `diff`, each kernel's first call (compile and autotune included) and warm
calls, and the time of one diff with warm workers. Results: bench/results/h200-main-job.json, written
as the run goes on.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import save, spread  # noqa: I001

from gdncheck.capture.make import make
from gdncheck.compare.diff import diff_case, report_of
from gdncheck.compare.inputs import call_of
from gdncheck.compare.jsonout import document
from gdncheck.compare.session import Settings
from gdncheck.kernels.pool import WorkerPool

TOKENS = 11_686
KERNELS = ("fla.chunk@0.4.0", "fla.chunk@0.6.0")
WARM_CALLS = 20
DIFFS = 2
STARTED = time.perf_counter()


def say(text: str) -> None:
    """Progress with the time since the start, so that a run cut short says where it was."""
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", flush=True)


def kernel_seconds(handles, case) -> dict[str, dict]:
    """First call (both kernels compile at once), and the spread of warm calls, by kernel."""
    seconds = {}
    with ThreadPoolExecutor(len(handles)) as threads:
        firsts = list(threads.map(lambda handle: handle.run([call_of(case)])[0], handles))
    for handle, first in zip(handles, firsts, strict=True):
        say(f"{handle.name}: {first.status}, first call {first.seconds} s {first.message or ''}")
        if first.status != "ok":
            seconds[handle.name] = {"status": first.status, "message": first.message}
            continue
        warm = [r.seconds for r in handle.run([call_of(case)] * WARM_CALLS)]
        seconds[handle.name] = {
            "first_call": first.seconds, "warm": spread(warm),
            "launched": first.evidence.get("launched"),
        }  # fmt: skip
    return seconds


def main() -> None:
    case = make(
        "qwen", lengths=(TOKENS,), k_heads=16, v_heads=32, dims=(128, 128), dtype="bf16", state="random"
    )
    say("case made")
    settings = Settings(relations="quick")
    with WorkerPool(device="cuda", time_limit=240) as pool:
        handles = [pool.begin(name) for name in KERNELS]
        numbers = {"tokens": TOKENS, "kernels": kernel_seconds(handles, case)}
        save("h200-main-job", __file__, numbers)
        say("kernels timed")
        seconds: list[float] = []
        for number in range(DIFFS):
            profile = cProfile.Profile()
            started = time.perf_counter()
            row, results = profile.runcall(
                diff_case, case, handles, settings, asked=True, device="cuda", say=say
            )
            seconds.append(time.perf_counter() - started)
            say(f"diff {number}: {seconds[-1]:.2f} s")
            report = report_of(
                results,
                [row],
                all_layers=False,
                strict=False,
                settings=settings,
                seconds=seconds[-1],
                command=f"python bench/h200/{Path(__file__).name}",
            )
            # Saved and told after each diff: time may end in the next one.
            numbers |= {"diff_seconds": spread(seconds), "diff": document(report)}
            save("h200-main-job", __file__, numbers)
            for result in numbers["diff"]["results"]:
                print(
                    result["kernel"], result["verdict"], result["error"], result["reason"][:300], flush=True
                )
            pstats.Stats(profile).sort_stats("cumtime").print_stats(30)


if __name__ == "__main__":
    main()
