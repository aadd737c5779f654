"""Every kernel on a GPU, judged by the whole pipeline, each in a process of its own until the time is up.

usage: python bench/h200/matrix.py --seconds 480 --out DIR [--kernel NAME]... [--device cpu]
       python bench/h200/matrix.py --summary DIR       # the table of a run, also of one that was cut

The one idea: one log per kernel, a JSON line per judgement, flushed; whatever ends a run, what was judged
before is kept, and the summary is made from the logs alone. Kernels run at the same time and nothing is
autotuned (GDNCHECK_TUNE=never), so a cold machine judges its first case within a minute. For each kernel:

- exact: cases in which every bit is known, lengths around chunk boundaries, heads 1, 2 and 4 to a key head;
- relations: all that need no process of their own, on three cases, one of them with a pool of slots;
- empty: an empty sequence before, between and behind others, which the adapters refuse unless told not to;
- seeded: `honest_cases` 0, 1, 2, ... in one shape (bf16, K = V = 128, 2 key heads, 4 value heads, a float32
  state); a case that is refused for its empty sequences is judged again without them.

Leaves to others: other shapes (`engines`), autotune's choices (`autotune_kkt`), long prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import msgspec
import torch
from gdncheck.capture.case import Case
from gdncheck.capture.errors import GdncheckError
from gdncheck.capture.make import make
from gdncheck.compare.session import Settings, diff_one
from gdncheck.compare.soundness import soundness_of
from gdncheck.compare.verdict import DiffResult
from gdncheck.compare.witness import Witness
from gdncheck.kernels.interface import KernelCall, KernelInfo, RunResult
from gdncheck.kernels.pool import KernelHandle, WorkerPool
from honest_cases import arguments
from matrix_table import print_table, summarise
from record import save
from side_by_side import run_side_by_side

KERNELS = (
    "fla.chunk@0.4.0", "fla.chunk@0.6.0", "vllm.chunk@0.19.1", "vllm.chunk@0.33.0", "sglang.chunk@0.5.23",
    "flashinfer.chunk@0.6.6", "fla.recurrent@0.6.0", "vllm.recurrent@0.19.1", "vllm.recurrent@0.33.0",
    "sglang.recurrent@0.5.23",
)  # fmt: skip
HEADS, DIMS = {"k_heads": 2, "v_heads": 4}, (128, 128)
SEED = 0
CALL_LIMIT = 150.0  # seconds for one call, compile included
HANGING = 40.0  # seconds for a call with an empty sequence, on which a kernel may hang


class Trialled(NamedTuple):
    """One case that a kernel is to be judged on."""

    phase: str
    label: str
    case: Case
    relations: Any = "none"
    allow_empty: bool = False


class AllowingEmpty:
    """An open kernel whose adapter is told to run empty sequences that it would refuse."""

    def __init__(self, handle: KernelHandle) -> None:
        self.handle = handle

    @property
    def info(self) -> KernelInfo:
        return self.handle.info

    def run(self, calls: list[KernelCall]) -> list[RunResult]:
        allowed = [
            msgspec.structs.replace(
                call,
                options=msgspec.structs.replace(
                    call.options, extra={**call.options.extra, "allow_empty": True}
                ),
            )
            for call in calls
        ]
        return self.handle.run(allowed, time_limit=HANGING)  # one kernel never comes back


def fixed_cases(small: bool) -> Iterator[Trialled]:
    """Exact cases, relations and empty sequences, in the order in which they are judged.

    small: few tokens, for Triton's interpreter.
    """
    lengths = [3, 1, 5] if small else [64, 1, 200, 63, 130]
    yield Trialled("exact", "exact mixed", synthetic("exact", lengths))
    if not small:
        for n in (1, 15, 63, 64, 65, 128, 129, 257):
            yield Trialled("exact", f"exact {n}", synthetic("exact", [n], seed=n))
        for k_heads in (1, 4):
            yield Trialled(
                "exact", f"exact, {k_heads} key heads", synthetic("exact", [70, 9], k_heads=k_heads)
            )
    related = [5, 1, 7] if small else [64, 1, 100, 70]
    yield Trialled("relations", "qwen", synthetic("qwen", related), "auto")
    yield Trialled("relations", "pool of slots", pooled(related), "auto")
    yield Trialled("relations", "mixed decay", synthetic("mixed-decay", related[::-1], seed=2), "auto")
    for name, at in (("first", 0), ("between", 1), ("last", 2)):
        with_empty = [3, 4] if small else [65, 70]
        with_empty.insert(at, 0)
        yield Trialled("empty", f"empty {name}", synthetic("qwen", with_empty, seed=at), "none", True)


def synthetic(family: str, lengths: list[int], seed: int = 0, **changed: Any) -> Case:
    return make(family, lengths=lengths, dims=DIMS, state="random", seed=seed, **{**HEADS, **changed})


def pooled(lengths: list[int]) -> Case:
    """States in a pool, in no order, NaN in the slots of nobody; the second sequence starts fresh in a slot
    that somebody left full."""
    case = synthetic("qwen", lengths, seed=1)
    state = case["initial_state"]
    n = len(state)
    pool = torch.full((2 * n, *state.shape[1:]), float("nan"))
    at = torch.arange(2 * n - 1, 0, -2)[torch.randperm(n, generator=torch.Generator().manual_seed(3))]
    pool[at] = state
    pool[at[1]] = 1e30
    fresh = torch.ones(n, dtype=torch.bool)
    fresh[1] = False
    changed = case.with_tensors(
        initial_state=None, pool=pool, slot_indices=at.to(torch.int32), has_initial_state=fresh
    )
    return msgspec.structs.replace(changed, finite=False)


def seeded_arguments(number: int, small: bool) -> dict[str, Any]:
    drawn = arguments(number, SEED, one_shape=True) | {**HEADS, "dims": DIMS, "dtype": "bf16"}
    if small:
        drawn["lengths"] = [min(n, 6) for n in drawn["lengths"]]
    return drawn


def without_empty(drawn: dict[str, Any]) -> dict[str, Any]:
    """The same without its empty sequences."""
    kept = [i for i, n in enumerate(drawn["lengths"]) if n]
    state = drawn["state"]
    return drawn | {
        "lengths": [drawn["lengths"][i] for i in kept],
        "state": [state[i] for i in kept] if isinstance(state, list) else state,
    }


def judge_kernel(
    name: str, log: Path, device: str, until: float, cases: int, every: int, first: int = 0
) -> None:
    """Judge one kernel on everything that fits into the time; one JSON line each.

    every: relations are asked on every so many of the seeded cases. first: the seeded case to start with;
    from a later one than 0 nothing else is judged.
    """
    torch.set_num_threads(1)
    small = device == "cpu"
    with log.open("a") as out, WorkerPool(device=device, time_limit=CALL_LIMIT) as pool:

        def write(line: dict[str, Any]) -> None:
            out.write(json.dumps(line, default=str) + "\n")
            out.flush()

        try:
            kernel = pool.open(name, environment={"GDNCHECK_TUNE": "never"})
        except GdncheckError as error:
            write({"kernel": name, "phase": "open", "verdict": "cannot run", "reason": str(error)})
            return
        write({"kernel": name, "phase": "open", "verdict": "opened", "environment": kernel.info.environment})
        for trialled in fixed_cases(small) if first == 0 else ():
            if time.time() > until:
                return
            write(judged(kernel, name, trialled))
        for number in range(first, cases):
            if time.time() > until:
                return
            drawn = seeded_arguments(number, small)
            relations = "auto" if number % every == 0 else "none"
            line = judged(kernel, name, seeded(number, drawn, relations))
            write(line)
            if line["verdict"] == "skipped" and 0 in drawn["lengths"]:
                again = seeded(number, without_empty(drawn), relations, " without its empty sequences")
                write(judged(kernel, name, again))
        write({"kernel": name, "phase": "end", "verdict": "all judged"})


def seeded(number: int, drawn: dict[str, Any], relations: str, more: str = "") -> Trialled:
    return Trialled("seeded", f"case {number} {drawn['family']}{more}", make(**drawn), relations)


def judged(kernel: KernelHandle, name: str, trialled: Trialled) -> dict[str, Any]:
    """A log line: one kernel on one case. A fault of the judge itself is a line too.

    Judged on the CPU: cases this small gain nothing from a GPU, which the kernels have to themselves.
    """
    started = time.time()
    runner: Any = AllowingEmpty(kernel) if trialled.allow_empty else kernel
    head = {"kernel": name, "phase": trialled.phase, "case": trialled.label, "lengths": trialled.case.lengths}
    try:
        witness = Witness(trialled.case, device="cpu", seed=SEED)
        result = diff_one(
            runner, witness, soundness_of(witness), Settings(seed=SEED, relations=trialled.relations)
        )
    except Exception as error:  # one bad case must not end a run: it is reported
        return head | {"verdict": "judge failed", "reason": f"{type(error).__name__}: {error}"}
    return head | line_of(result) | {"took": round(time.time() - started, 2)}


def line_of(result: DiffResult) -> dict[str, Any]:
    """What the log keeps: everything that speaks, and the names of what was asked and silent."""
    ruling = result.ruling
    spoke = [o for o in ruling.outcomes if o.status in ("fires", "suspect") or (o.tier == 4 and o.reason)]
    return {
        "verdict": result.verdict,
        "tier": ruling.tier,
        "rule": ruling.rule,
        "reason": ruling.reason,
        "contract_differences": [msgspec.to_builtins(d) for d in ruling.contract_differences],
        "place": msgspec.to_builtins(ruling.first_nonfinite or ruling.worst_tile),
        "error": ruling.error,
        "ratio": ruling.ratio,
        "seconds": result.seconds,
        "launched": result.evidence.get("launched"),
        "hypothesis": msgspec.to_builtins(ruling.hypothesis),
        "silent": sorted({o.check for o in ruling.outcomes if o.status == "ok" and o not in spoke}),
        "outcomes": [msgspec.to_builtins(o) for o in spoke],
    }


def run_all(chosen: argparse.Namespace) -> None:
    """Start every kernel's process, wait for them or the time, and end what is left."""
    until = time.time() + chosen.seconds
    commands = {
        name: [
            sys.executable, __file__, "--one", name, "--out", str(chosen.out), "--device", chosen.device,
            "--until", str(until), "--cases", str(chosen.cases), "--every", str(chosen.every),
            "--first", str(chosen.first),
        ]
        for name in chosen.kernel or KERNELS
    }  # fmt: skip
    facts = {"seconds": chosen.seconds, "device": chosen.device}
    run_side_by_side(commands, chosen.out, until, facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kernel", action="append", help="default: all of the table")
    parser.add_argument("--seconds", type=float, default=480.0, help="time for everything")
    parser.add_argument("--cases", type=int, default=200, help="seeded cases")
    parser.add_argument("--first", type=int, default=0, help="go on with this seeded case")
    parser.add_argument("--every", type=int, default=8, help="relations on every so many seeded cases")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path("matrix"), help="folder of the logs")
    parser.add_argument("--summary", type=Path, metavar="DIR", help="only tell what the logs there hold")
    parser.add_argument("--name", help="also write bench/results/NAME.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one is not None:
        log = chosen.out / f"{chosen.one}.jsonl"
        judge_kernel(chosen.one, log, chosen.device, chosen.until, chosen.cases, chosen.every, chosen.first)
        return
    if chosen.summary is None:
        run_all(chosen)
    found = summarise(chosen.summary or chosen.out)
    print_table(found)
    if chosen.name:
        save(chosen.name, __file__, found)


if __name__ == "__main__":
    main()
