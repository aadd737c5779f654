"""Every convolution on a GPU: public faults, exact cases and seeded ones, each judged with its further calls.

usage: python bench/h200/convs.py --seconds 240 --out DIR [--kernel NAME]... [--device cpu] [--small]
       python bench/h200/convs.py --summary DIR        # the table of a run, also of one that was cut

The one idea: as `matrix.py`, one log per kernel with a line per judgement, flushed, and a summary from the
logs alone; a kernel whose log is there goes on where it stopped. Kernels run at the same time, each in a
process of its own (and its own worker). causal-conv1d must be built before: `build_causal_conv1d.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from conv_cases import exact, public, seeded
from gdncheck.capture.errors import GdncheckError
from gdncheck.compare.ops.op import OpInputs
from gdncheck.compare.ops.session import diff_op
from gdncheck.compare.ops.table import OPS
from gdncheck.kernels.pool import WorkerPool
from record import save
from side_by_side import lines_of

KERNELS = (
    "fla.conv@0.4.0", "fla.conv@0.6.0", "vllm.conv@0.19.1", "vllm.conv@0.33.0", "transformers.conv",
    "causal-conv1d.conv@1.6.0", "fla.conv-update@0.4.0", "fla.conv-update@0.6.0",
    "vllm.conv-update@0.19.1", "vllm.conv-update@0.33.0", "transformers.conv-update",
    "causal-conv1d.conv-update@1.6.0",
)  # fmt: skip
CALL_LIMIT = 120.0  # seconds for one call, compile included
SMALL_CHANNELS = 32


def cases(op: str, device: str, small: bool) -> Iterator[tuple[str, OpInputs]]:
    """All cases of an operation, in order, without an end."""
    channels = {"channels": SMALL_CHANNELS} if small else {}
    yield from public(op, device, **channels)
    yield from exact(op, device)
    number = 0
    while True:
        yield seeded(op, device, number)
        number += 1


def judge_kernel(name: str, log: Path, device: str, seconds: float, small: bool) -> None:
    """Judge one kernel until the time is up, going on where its log ends."""
    started = time.monotonic()
    op = name.partition("@")[0].partition(".")[2]
    done = {line["label"] for line in lines_of(log)}
    where = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    with WorkerPool(device=device, time_limit=CALL_LIMIT) as pool, log.open("a") as file:
        try:
            handle = pool.begin(name)
            _ = handle.info
        except GdncheckError as error:
            write(file, {"kernel": name, "label": "open", "verdict": "skipped", "reason": str(error)})
            return
        for label, inputs in cases(op, where, small):
            if time.monotonic() - started > seconds:
                return
            if label in done:
                continue
            ruling = diff_op(handle, OPS[op], inputs).ruling
            line: dict[str, Any] = {"kernel": name, "label": label, "verdict": ruling.verdict}
            line |= {"rule": ruling.rule, "reason": ruling.reason, "ratio": ruling.ratio}
            line["not_applicable"] = [
                o.check for o in ruling.outcomes if o.status == "not-applicable" and o.tier == 4
            ]
            write(file, line)


def write(file: Any, line: dict[str, Any]) -> None:
    file.write(json.dumps(line, default=str) + "\n")
    file.flush()


def summary(out: Path) -> dict[str, Any]:
    """Per kernel: how many of each verdict, and everything that is neither a pass nor skipped."""
    table: dict[str, Any] = {}
    for log in sorted(out.glob("*.jsonl")):
        lines = lines_of(log)
        if not lines:
            continue
        name = lines[0]["kernel"]
        table[name] = {
            "verdicts": dict(Counter(line["verdict"] for line in lines)),
            "largest_ratio": max((line.get("ratio") or 0.0 for line in lines), default=0.0),
            "others": [line for line in lines if line["verdict"] != "pass"][:40],
        }
        print(f"{name:34} {table[name]['verdicts']}")
        for line in table[name]["others"][:6]:
            print(f"    {line['label']}: {line['verdict']}: {line['reason'][:200]}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--out", type=Path, default=Path("convs"))
    parser.add_argument("--kernel", action="append", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="few channels, for a run on a CPU")
    parser.add_argument("--processes", type=int, default=len(KERNELS))
    parser.add_argument("--name", default="h200-convs")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--summary", type=Path)
    given = parser.parse_args()
    if given.summary:
        summary(given.summary)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    if given.one:
        log = given.out / f"{given.one.replace('@', '-')}.jsonl"
        judge_kernel(given.one, log, given.device, given.seconds, given.small)
        return
    started, waiting = time.monotonic(), list(given.kernel or KERNELS)
    running: list[subprocess.Popen[bytes]] = []
    while waiting or running:
        running = [child for child in running if child.poll() is None]
        while waiting and len(running) < given.processes:
            left = given.seconds - (time.monotonic() - started)
            if left <= 0:
                waiting.clear()
                break
            command = [sys.executable, __file__, "--one", waiting.pop(0), "--seconds", f"{left:.0f}"]
            command += ["--out", str(given.out), "--device", given.device]
            command += ["--small"] if given.small else []
            environment = {**os.environ, "GDNCHECK_TUNE": "never", "OMP_NUM_THREADS": "1"}
            running.append(subprocess.Popen(command, env=environment))
        if time.monotonic() - started > given.seconds + CALL_LIMIT:
            for child in running:
                child.kill()
        time.sleep(0.5)
    table = summary(given.out)
    save(given.name, __file__, {"kernels": table})


if __name__ == "__main__":
    main()
