"""Row 1 of the public faults: the kkt stage under every autotune configuration, on one GPU.

usage: python bench/h200/autotune_kkt.py [--seconds 240] [--work FOLDER] [--only TARGET]... [--cpu]

16 key and 32 value heads, K = 128, T = 64 to 11,686, beta and g in bf16 and fp32, every configuration of
vLLM 0.19.1, FLA 0.4.0 and FLA 0.6.0 (also its fused kkt + solve) 40 times, half of them beside a busy
stream: bit for bit with itself and with the other configurations, and against float64. Then fresh tunings at
T = 16, 32, 64 (where an engine tunes) and at the longest. Configurations are compiled first, by as many
processes as there are cores. Run it again with the same --work to go on where the time ran out.
Results: bench/results/h200-autotune-kkt.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from gdncheck.compare.jsonout import plain_numbers
from kkt_stage import LOST, TARGETS, lines_of
from record import save

TOKENS = (64, 128, 474, 2048, 11_686)
CHILD = str(Path(__file__).with_name("kkt_stage.py"))
COMPILE_SHARE = 0.4  # of the time, at most


def run_children(commands: list[list[str]], deadline: float) -> list[int | None]:
    """Run them side by side; those that are not ready at the deadline are ended. Their exit statuses."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    children = [subprocess.Popen([sys.executable, *command], env=environment) for command in commands]
    statuses: list[int | None] = []
    for child in children:
        try:
            statuses.append(child.wait(max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            statuses.append(None)
    return statuses


def compile_all(targets: list[str], device: str, deadline: float) -> None:
    """Fill Triton's cache with every configuration of every target, spread over the cores."""
    cores = len(os.sched_getaffinity(0))
    shares = max(1, cores // len(targets))
    run_children(
        [
            [CHILD, "compile", name, "--device", device, "--share", str(i), "--shares", str(shares)]
            for name in targets
            for i in range(shares)
        ],
        deadline,
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One target in a few numbers: what moved, what was wrong, what did not compile, what was picked."""
    pins = [row for row in rows if row.get("kind") == "pin"]
    ran = [row for row in pins if row["status"] == "ok"]
    per_input: dict[tuple[Any, ...], set[str]] = {}
    for row in ran:
        per_input.setdefault((row["beta"], row["g"], row["tokens"]), set()).update(map(str, row["outputs"]))
    picks: dict[str, Counter[str]] = {}
    for row in rows:
        if row.get("kind") == "tuning":
            picks.setdefault(str(row["tokens"]), Counter())[described(row["pick"])] += 1
    return {
        "pinned_inputs": len(pins), "runs": sum(row["runs"] for row in ran),
        "moving": [brief(row) for row in ran if row["distinct"] > 1],
        "wrong": [brief(row) for row in ran if row["wrong"]],
        "compile_failures": dict(Counter(
            f"beta {row['beta']}, g {row['g']}: {row['message'][:160]}"
            for row in pins if row["status"] == "compile failure"
        )),
        "errors": [brief(row) for row in pins if row["status"] == "error"],
        "distinct_outputs_across_configurations": {
            ", ".join(map(str, key)): len(found) for key, found in per_input.items()},
        "largest_error_over_limit": max((row["worst"] for row in ran if row["judged"]), default=None),
        "picks": {tokens: dict(counter.most_common()) for tokens, counter in picks.items()},
    }  # fmt: skip


def described(pin: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in pin.items())


def brief(row: dict[str, Any]) -> dict[str, Any]:
    keys = ("beta", "g", "tokens", "configuration", "runs", "distinct", "outputs", "worst", "entries",
            "nonfinite", "place", "message")  # fmt: skip
    return {key: row[key] for key in keys if key in row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=240, help="for everything, compile included")
    parser.add_argument("--work", default=".gpu/autotune-kkt", help="folder of the part files")
    parser.add_argument("--only", action="append", choices=list(TARGETS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--tunings", type=int, default=20, help="fresh tunings per length")
    parser.add_argument("--cpu", action="store_true", help="try the script on Triton's interpreter")
    parser.add_argument("--name", default="h200-autotune-kkt", help="of the result file")
    options = parser.parse_args()
    targets = options.only or list(TARGETS)
    device = "cpu" if options.cpu else "cuda"
    started = time.monotonic()
    work = Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    if device == "cuda":
        compile_all(targets, device, started + options.seconds * COMPILE_SHARE)
        print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    deadline = started + options.seconds - 5
    found: dict[str, Any] = {}
    for number, name in enumerate(targets):
        # What is left is shared among those that are left; a child needs some seconds to start.
        share = (deadline - time.monotonic()) / (len(targets) - number)
        part = work / f"{name}.jsonl"
        command = [
            CHILD, "measure", name, "--device", device, "--part", str(part),
            "--repeats", str(options.repeats), "--tunings", str(options.tunings),
            "--seconds", str(max(1.0, share - 15 * (device == "cuda"))),
            "--tokens", *map(str, options.tokens),
        ]  # fmt: skip
        until = time.monotonic() + max(1.0, share)
        status: int | None = LOST
        while status == LOST and time.monotonic() < until:
            status = run_children([command], until)[0]
        lines = lines_of(part)
        rows = [row for line in lines for row in line["rows"]]
        expected = 2 * 3 * len(options.tokens)
        done = sum(line["block"][0] == "pins" for line in lines)
        found[name] = {"exit_status": status, "blocks": f"{done} of {expected}", **summary(rows)}
        print(
            name,
            {key: found[name][key] for key in ("blocks", "runs", "moving", "wrong", "picks")},
            flush=True,
        )
        found[name]["rows"] = rows
    numbers = {
        "tokens": options.tokens,
        "repeats": options.repeats,
        "seconds": time.monotonic() - started,
        "targets": found,
    }
    save(options.name, __file__, plain_numbers(numbers))


if __name__ == "__main__":
    main()
