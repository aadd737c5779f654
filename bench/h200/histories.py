"""Histories of an engine's calls through real kernels on a GPU, until the time is up.

usage: python bench/h200/histories.py --seconds 420 --out DIR [--lane NAME]... [--device cpu] [--name NAME]
       python bench/h200/histories.py --summary DIR

A lane is a set of kernels that play the roles of one engine (prefill, decode, verify, conv). Each lane has a
process of its own and a log of JSON lines, flushed; a run that was ended goes on where it stopped. First the
rows of public-faults.md as fixed histories: 8 (a recycled slot, fresh sequences of one token and of more),
10 (one-token sequences among long ones, states not zero), 29 (preempted, slot used by others, resumed from
zero, from a checkpoint and with its state kept); then drawn histories of 60 steps, seed 1, numbers 0, 1, and
so on, without and with checkpoints in turn. Every step is judged by the ledger and against each sequence's
own truth; a failure is shrunk.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import msgspec
import torch
from gdncheck.capture.errors import GdncheckError
from gdncheck.compare.life.draw import DRAFT, SLOTS, draw_history
from gdncheck.compare.life.life import LifeResult, Settings, one_kernel, players
from gdncheck.compare.life.steps import (
    Arrive,
    Call,
    Decode,
    Finish,
    History,
    Preempt,
    Prefill,
    Resume,
    step_words,
)
from gdncheck.compare.life.tokens import Sizes
from gdncheck.kernels.pool import WorkerPool
from record import save
from side_by_side import lines_of, run_side_by_side

CALL_LIMIT = 200.0  # seconds for one call, compile included
STEPS = 60


class Lane(NamedTuple):
    """One engine: who plays which role."""

    prefill: str
    decode: str | None = None
    verify: str | None = None
    conv: str | None = None
    conv_update: str | None = None
    state_dtype: str = "float32"

    @property
    def roles(self) -> dict[str, str | None]:
        return {n: getattr(self, n) for n in ("decode", "verify", "conv", "conv_update")}


def vllm(version: str, prefill: str, **more: Any) -> Lane:
    """vLLM's kernels of one version around a prefill kernel."""
    found = {n: f"vllm.{n.replace('_', '-')}@{version}" for n in ("verify", "conv", "conv_update")}
    return Lane(f"vllm.{prefill}@{version}", **{"decode": f"vllm.recurrent@{version}", **found, **more})


LANES: dict[str, Lane] = {
    "vllm-0.19.1": vllm("0.19.1", "chunk"),
    "vllm-0.33.0": vllm("0.33.0", "chunk"),
    "vllm-0.19.1-recurrent": vllm("0.19.1", "recurrent"),
    "vllm-0.33.0-recurrent": vllm("0.33.0", "recurrent"),
    "vllm-0.33.0-fused": vllm("0.33.0", "chunk", decode="vllm.decode@0.33.0", verify="vllm.decode@0.33.0"),
    "vllm-0.33.0-packed": vllm("0.33.0", "chunk", decode="vllm.packed-decode@0.33.0"),
    "vllm-0.19.1-bf16-pool": vllm("0.19.1", "chunk", state_dtype="bfloat16"),
    "fla-0.4.0": Lane("fla.chunk@0.4.0", "fla.recurrent@0.4.0"),
    "fla-0.6.0": Lane("fla.chunk@0.6.0", "fla.recurrent@0.6.0"),
    "fla-0.6.0-recurrent": Lane("fla.recurrent@0.6.0"),
    "sglang-0.5.23": Lane("sglang.chunk@0.5.23", "sglang.recurrent@0.5.23", "sglang.verify@0.5.23"),
}


def sizes_of(small: bool) -> Sizes:
    """A quarter of the real layer's heads; small: for Triton's interpreter."""
    if small:
        return Sizes(k_heads=1, v_heads=2, key_dim=16, value_dim=16, dtype="bfloat16")
    return Sizes(k_heads=2, v_heads=4, key_dim=128, value_dim=128, dtype="bfloat16")


def long_call(small: bool, sequence: int, tokens: int) -> Prefill:
    return Prefill(sequence=sequence, tokens=min(tokens, 5) if small else tokens)


def row_8(small: bool) -> History:
    """Slots handed on, to fresh sequences of one token, of two, and of many."""
    steps: list[Any] = []
    for n, tokens in enumerate((130, 1, 2, 200, 1, 65)):
        steps += [Arrive(sequences=(n,)), Call(rows=(long_call(small, n, tokens),))]
        steps += [Call(rows=(Decode(sequence=n),)), Finish(sequence=n)]
    return History(steps=tuple(steps), slots=SLOTS, draft=DRAFT, seed=8, name="row 8")


def row_10(small: bool) -> History:
    """cu_seqlens [0, 1, 2, 3, 203], every sequence from a state of its own."""
    first = tuple(long_call(small, n, 70) for n in range(4))
    mixed = (*(Prefill(sequence=n, tokens=1) for n in range(3)), long_call(small, 3, 200))
    fresh = (
        *(Prefill(sequence=n, tokens=1) for n in range(4, 6)),
        Decode(sequence=0),
        long_call(small, 3, 129),
    )
    steps = (
        Arrive(sequences=(0, 1, 2, 3)), Call(rows=first), Call(rows=mixed), Arrive(sequences=(4, 5)),
        Call(rows=fresh), Call(rows=tuple(Decode(sequence=n) for n in range(6)), padded=2),
    )  # fmt: skip
    return History(steps=steps, slots=SLOTS, draft=DRAFT, seed=10, name="row 10")


def row_29(small: bool) -> History:
    """Three sequences stop; others use what they let go; they come back in three ways."""
    three = (0, 1, 2)
    steps: list[Any] = [Arrive(sequences=three), Call(rows=tuple(long_call(small, n, 100) for n in three))]
    steps.append(Call(rows=tuple(Decode(sequence=n, keep=n == 1) for n in three)))
    steps += [Preempt(sequence=n, state="kept" if n == 2 else "dropped") for n in three]
    steps += [Arrive(sequences=(3, 4)), Call(rows=(long_call(small, 3, 1), long_call(small, 4, 80)))]
    steps += [Call(rows=(Decode(sequence=3), Decode(sequence=4))), Finish(sequence=3), Finish(sequence=4)]
    steps += [Resume(sequence=n, source=("zero", "checkpoint", "kept")[n]) for n in three]
    steps.append(Call(rows=(long_call(small, 0, 101), Prefill(sequence=1, tokens=1), Decode(sequence=2))))
    steps += [Call(rows=tuple(Decode(sequence=n) for n in three))] * 3
    return History(steps=tuple(steps), slots=SLOTS, draft=DRAFT, seed=29, name="row 29")


def histories(small: bool, drawn: int) -> Iterator[History]:
    """In the order in which they are run."""
    for make in (row_8, row_10, row_29):
        yield make(small)
    for number in range(drawn):
        found = draw_history(
            1, number, 12 if small else STEPS, longest=3 if small else 70, checkpoints=number % 2 == 1
        )
        kept = "" if number % 2 else ", no checkpoints"
        yield msgspec.structs.replace(found, name=found.name + kept)


def run_lane(name: str, log: Path, device: str, until: float, drawn: int) -> None:
    """All histories that the time allows; one JSON line each."""
    torch.set_num_threads(1)
    lane, small = LANES[name], device == "cpu"
    known = [json.loads(line)["history"] for line in log.read_text().splitlines()] if log.exists() else []
    with log.open("a") as out, WorkerPool(device=device, time_limit=CALL_LIMIT) as pool:

        def write(line: dict[str, Any]) -> None:
            out.write(json.dumps({"lane": name, **line}, default=str) + "\n")
            out.flush()

        try:
            os.environ["GDNCHECK_TUNE"] = "never"
            played = players(lane.prefill, lane.roles, pool, {})
        except GdncheckError as error:
            write({"history": "open", "verdict": "cannot run", "reason": str(error)})
            return
        for history in histories(small, drawn):
            if time.time() > until:
                return
            if history.name in known:
                continue
            settings = Settings(
                bookkeeper="sound", steps=len(history.steps), seed=history.seed, history=None,
                slots=history.slots, draft=history.draft, longest=70, checkpoints=True,
                sizes=sizes_of(small), state_dtype=lane.state_dtype,
            )  # fmt: skip
            try:
                write(line_of(one_kernel(lane.prefill, played, settings, history), history))
            except Exception as error:  # one bad history must not end a lane: it is reported
                reason = f"{type(error).__name__}: {error}"
                write({"history": history.name, "verdict": "judge failed", "reason": reason})


def line_of(result: LifeResult, history: History) -> dict[str, Any]:
    short = result.history
    return {
        "history": history.name, "verdict": result.verdict, "reason": result.reason, "steps": result.steps,
        "calls": result.calls, "rows": result.rows, "tokens": result.tokens, "ratio": result.ratio,
        "notes": list(result.notes), "seconds": round(result.seconds, 2), "found_at": result.found_at,
        "failure": msgspec.to_builtins(result.failure),
        "shortest": None if short is None else [step_words(s) for s in short.steps],
    }  # fmt: skip


def run_all(chosen: argparse.Namespace) -> None:
    """Start every lane's process, wait for them or the time, and end what is left."""
    until = time.time() + chosen.seconds
    commands = {
        name: [
            sys.executable, __file__, "--one", name, "--out", str(chosen.out), "--device", chosen.device,
            "--until", str(until), "--drawn", str(chosen.drawn),
        ]
        for name in chosen.lane or LANES
    }  # fmt: skip
    facts = {"seconds": chosen.seconds, "device": chosen.device}
    run_side_by_side(commands, chosen.out, until, facts, {"GDNCHECK_TUNE": "never"})


def summarise(folder: Path) -> dict[str, Any]:
    """What the logs hold, lane by lane."""
    found: dict[str, Any] = {"run": json.loads((folder / "run.json").read_text()), "lanes": {}}
    for log in sorted(folder.glob("*.jsonl")):
        lines = lines_of(log)
        words = sorted({line["verdict"] for line in lines})
        passed = [line["ratio"] for line in lines if line["verdict"] == "pass"]
        found["lanes"][log.stem] = {
            "kernels": LANES[log.stem]._asdict() if log.stem in LANES else None,
            "verdicts": {w: sum(line["verdict"] == w for line in lines) for w in words},
            "steps": sum(line.get("steps", 0) for line in lines),
            "calls": sum(line.get("calls", 0) for line in lines),
            "tokens": sum(line.get("tokens", 0) for line in lines),
            "largest_ratio": max(passed, default=None),
            "rows": {line["history"]: line["verdict"] for line in lines if line["history"].startswith("row")},
            "notes": sorted({note for line in lines for note in line.get("notes", [])}),
            "departures": [line for line in lines if line["verdict"] != "pass"],
        }
    return found


def print_table(found: dict[str, Any]) -> None:
    for name, lane in found["lanes"].items():
        words = ", ".join(f"{count} {word}" for word, count in lane["verdicts"].items())
        ratio = lane["largest_ratio"]
        print(f"{name}: {words}; {lane['steps']} steps, {lane['calls']} calls, largest ratio {ratio}")
        for line in lane["departures"]:
            print(f"    {line['history']}: {line['verdict']}: {line['reason']}")
            for number, step in enumerate(line.get("shortest") or [], start=1):
                print(f"        {number} {step}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lane", action="append", choices=LANES, help="default: all")
    parser.add_argument("--seconds", type=float, default=420.0, help="time for everything")
    parser.add_argument("--drawn", type=int, default=400, help="drawn histories of a lane at most")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path("histories"), help="folder of the logs")
    parser.add_argument("--summary", type=Path, metavar="DIR", help="only tell what the logs there hold")
    parser.add_argument("--name", help="also write bench/results/NAME.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one is not None:
        run_lane(chosen.one, chosen.out / f"{chosen.one}.jsonl", chosen.device, chosen.until, chosen.drawn)
        return
    if chosen.summary is None:
        run_all(chosen)
    found = summarise(chosen.summary or chosen.out)
    print_table(found)
    if chosen.name:
        save(chosen.name, __file__, found)


if __name__ == "__main__":
    main()
