"""Specificity: sound kernels on numbered in-domain cases; a `fail` is a false alarm, the worst bug.

Every judgement goes through the whole of `session` and `judge`; the fourteen kernels of a case share its
truth and yardsticks; one of them, in every second case, is also asked the relations and the companion.
Without --kernel they are the honest ones of `honest_kernels`, in this process; with --kernel real ones.

The log has one JSON line per case and is resumed: a run that was cut goes on where it stopped. Results:
bench/results/NAME.json.

    python specificity.py --cases 1000 --processes 2
    python specificity.py --cases 1000 --device cuda --few-shapes --kernel fla.chunk@0.4.0
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gdncheck.compare.session import Runner, Settings, diff_one
from gdncheck.compare.soundness import soundness_of
from gdncheck.compare.verdict import DiffResult
from gdncheck.compare.witness import Witness
from gdncheck.kernels.pool import WorkerPool
from honest_cases import arguments, case_number
from honest_kernels import InProcess, roster
from record import save

# One case in so many has a kernel that is asked the relations and the companion too; which kernel, turns.
RELATIONS_EVERY = 2
QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
RATIOS = ("output_rms_ratio", "output_max_ratio", "state_rms_ratio", "state_max_ratio", "error_over_bound")
ALARMS = ("fail", "suspect", "error", "timeout", "out-of-contract")


def judge_case(number: int, seed: int, *, device: str = "cpu") -> dict[str, Any]:
    """All honest kernels of one case: its log line."""
    started = time.process_time()
    case = case_number(number, seed)
    family = arguments(number, seed)["family"]
    kernels = roster(number, seed, family=family, dtype=case["v"].dtype, device=device)
    runners = [InProcess(kernel, device) for kernel in kernels]
    turn = number // RELATIONS_EVERY % len(runners) if number % RELATIONS_EVERY == 0 else None
    relations = ["all" if place == turn else "none" for place in range(len(runners))]
    rows = judge_runners(case, runners, relations, device=device)
    for row, kernel in zip(rows, kernels, strict=True):
        row["profile"] = kernel.declares or "undeclared"
    return {"case": number, "dtype": str(case["v"].dtype).removeprefix("torch."),
            "family": case.origin.family, "tokens": case["v"].shape[0],
            "seconds": time.process_time() - started, "rows": rows}  # fmt: skip


def judge_runners(
    case: Any, runners: Sequence[Runner], relations: Sequence[str], *, device: str
) -> list[dict[str, Any]]:
    """One row per runner on one case, truth and yardsticks shared."""
    witness = Witness(case, device=device)
    soundness = soundness_of(witness)
    rows = []
    for runner, asked in zip(runners, relations, strict=True):
        result = diff_one(runner, witness, soundness, Settings(relations=asked))  # type: ignore[arg-type]
        rows.append(row_of(result))
    return rows


def row_of(result: DiffResult) -> dict[str, Any]:
    """What the log keeps of a ruling."""
    numbers = {name: value for o in result.ruling.outcomes for name, value in o.numbers.items()}
    row = {"kernel": result.kernel, "verdict": result.verdict}
    row |= {name: round(numbers[name], 4) for name in RATIOS if name in numbers}
    if result.verdict != "pass":
        row |= {"rule": result.ruling.rule, "reason": result.ruling.reason}
    return row


def judge_real(number: int, seed: int, handles: Sequence[Any], shapes: dict[str, bool]) -> dict[str, Any]:
    """Real kernels on one case; each is its own profile. shapes: keywords of `case_number`.

    Judged on the CPU, wherever the kernels run: the cases are small.
    """
    started = time.process_time()
    case = case_number(number, seed, **shapes)
    rows = judge_runners(case, handles, ["auto"] * len(handles), device="cpu")
    for row in rows:
        row["profile"] = row["kernel"]
    return {"case": number, "dtype": str(case["v"].dtype).removeprefix("torch."),
            "family": case.origin.family, "tokens": case["v"].shape[0],
            "seconds": time.process_time() - started, "rows": rows}  # fmt: skip


def _start_process() -> None:
    torch.set_num_threads(1)


def _job(job: tuple[int, int, str]) -> dict[str, Any]:
    number, seed, device = job
    try:
        return judge_case(number, seed, device=device)
    except Exception as error:  # one bad case must not end a run of thousands: it is reported
        row = {"kernel": "judge", "verdict": "error", "rule": None, "reason": repr(error)}
        return {"case": number, "dtype": "", "family": arguments(number, seed)["family"], "tokens": 0,
                "seconds": 0.0, "rows": [{**row, "profile": "none"}]}  # fmt: skip


def honest_lines(numbers: Sequence[int], seed: int, processes: int, device: str) -> Iterator[dict[str, Any]]:
    jobs = [(number, seed, device) for number in numbers]
    if processes == 1:
        _start_process()
        yield from map(_job, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(processes, _start_process) as pool:
        yield from pool.imap_unordered(_job, jobs, chunksize=1)


def real_lines(
    numbers: Sequence[int], seed: int, names: Sequence[str], shapes: dict[str, bool], device: str
) -> Iterator[dict[str, Any]]:
    _start_process()
    with WorkerPool(device=device, time_limit=600) as pool:
        handles = [pool.begin(name) for name in names]
        for number in numbers:
            yield judge_real(number, seed, handles, shapes)


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts, alarms, and quantiles of the ratios by dtype and profile."""
    verdicts: Counter[str] = Counter()
    alarms, samples = [], {}
    for line in lines:
        for row in line["rows"]:
            verdicts[row["verdict"]] += 1
            if row["verdict"] in ALARMS:
                where = {name: line[name] for name in ("case", "family", "dtype")}
                alarms.append(
                    where | {name: row.get(name) for name in ("kernel", "verdict", "rule", "reason")}
                )
            for name in RATIOS:
                if name in row:
                    key = (name, line["dtype"], row["profile"])
                    samples.setdefault(key, []).append(row[name])
    table: dict[str, Any] = {}
    for (name, dtype, profile), values in sorted(samples.items()):
        shares = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor(QUANTILES).double())
        spread = {f"p{100 * q:g}": round(float(x), 4) for q, x in zip(QUANTILES, shares, strict=True)}
        table.setdefault(name, {}).setdefault(dtype, {})[profile] = {"n": len(values), **spread}
    return {
        "cases": len(lines),
        "judgements": sum(verdicts.values()),
        "verdicts": dict(verdicts),
        "alarms": alarms,
        "core_seconds": sum(line["seconds"] for line in lines),
        "largest_ratio_quantiles": table,
    }


def read_log(path: Path) -> dict[int, dict[str, Any]]:
    """Lines so far; a last line that was cut short is dropped."""
    if not path.exists():
        return {}
    found = {}
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        found[line["case"]] = line
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernel", action="append", help="a real kernel, in a worker (repeatable)")
    parser.add_argument("--few-shapes", action="store_true", help="4 heads, K = V in {64, 128}")
    parser.add_argument("--one-shape", action="store_true", help="4 heads, K = V = 64, float32 state always")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--log", type=Path, help="JSON lines; appended to and resumed")
    parser.add_argument("--name", default="specificity-cpu")
    chosen = parser.parse_args()

    lines = read_log(chosen.log) if chosen.log else {}
    numbers = [n for n in range(chosen.start, chosen.start + chosen.cases) if n not in lines]
    if chosen.kernel:
        shapes = {"few_shapes": chosen.few_shapes, "one_shape": chosen.one_shape}
        fresh = real_lines(numbers, chosen.seed, chosen.kernel, shapes, chosen.device)
    else:
        fresh = honest_lines(numbers, chosen.seed, chosen.processes, chosen.device)
    ends = time.monotonic() + chosen.seconds
    log = chosen.log.open("a") if chosen.log else None
    for line in fresh:
        lines[line["case"]] = line
        if log is not None:
            log.write(json.dumps(line) + "\n")
            log.flush()
        for row in line["rows"]:
            if row["verdict"] in ALARMS:
                print(f"case {line['case']} {line['family']} {line['dtype']}: {row['kernel']}: "
                      f"{row['verdict']} by {row.get('rule')}: {row.get('reason')}", flush=True)  # fmt: skip
        if time.monotonic() > ends:
            break
    total = summary([lines[number] for number in sorted(lines)])
    save(
        chosen.name,
        __file__,
        {"seed": chosen.seed, "device": chosen.device, "first_case": min(lines), **total},
    )
    rate = total["judgements"] / max(1e-9, total["core_seconds"])
    done = f"{total['judgements']} judgements of {total['cases']} cases"
    print(f"{done}: {total['verdicts']}; {rate:.1f} a core second")


if __name__ == "__main__":
    main()
