"""Every kernel on a GPU: exact cases, ordinary cases, what neighbours, gates and slots can do, and its time.

usage: python bench/h200/engines.py [--kernel NAME]... [--seeds 20] [--cpu]

For each kernel, in one worker: exact cases bit for bit; ordinary ones against float64 (relative RMS of
the worst head); grouped heads 1, 2, 4; empty and one-token sequences; gates of 0, and of 0 mixed with
large ones (a guard that zeroes positive differences of G shows here); a pool with NaN in slots that
nobody owns; the same call again, bit for bit; and the real layer's size with its time. What a kernel does
to a family that it refuses or fails is recorded, not hidden. Result: bench/results/h200-engines.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gdncheck.capture.case import Case
from gdncheck.capture.errors import GdncheckError
from gdncheck.capture.make import make
from gdncheck.compare.inputs import inputs_of
from gdncheck.kernels.interface import KernelCall, RunOptions
from gdncheck.kernels.pool import WorkerPool
from gdncheck.reference.truth import truth
from record import save

KERNELS = (
    "fla.chunk@0.4.0", "fla.chunk@0.6.0", "vllm.chunk@0.19.1", "vllm.chunk@0.33.0", "sglang.chunk@0.5.23",
    "flashinfer.chunk@0.6.6", "fla.recurrent@0.6.0", "vllm.recurrent@0.19.1", "vllm.recurrent@0.33.0",
    "sglang.recurrent@0.5.23",
)  # fmt: skip
DIMS = (128, 128)
V_HEADS = 4  # tuning keys hold the number of value heads: one number, one tuning
LAYER_TOKENS = 11_686


def families(seeds: int, recurrent: bool) -> dict[str, list[Case]]:
    """Name -> cases. A recurrent kernel takes one token after the other: short ones."""
    long = [70, 1, 20] if recurrent else [64, 1, 200, 63, 130]

    def cases(family: str, lengths: list[int] = long, k_heads: int = 2, **more: Any) -> list[Case]:
        return [
            make(
                family,
                lengths=lengths,
                k_heads=k_heads,
                v_heads=V_HEADS,
                dims=DIMS,
                state="random",
                seed=seed,
                **more,
            )
            for seed in range(seeds)
        ]

    def gates(lengths: list[int]) -> list[Case]:
        """A tenth of the tokens decays by -3, the rest not at all: G is a staircase of equal steps."""
        made = []
        for case in cases("gaussian", lengths):
            draw = torch.Generator().manual_seed(7)
            g = (
                -3.0
                * (torch.rand(case["g"].shape, generator=draw) < 0.1).float()
                * torch.rand(case["g"].shape, generator=draw)
            )
            made.append(case.with_tensors(g=g))
        return made

    return {
        "exact": cases("exact"),
        "ordinary": cases("gaussian"),
        "qwen": cases("qwen"),
        "heads-1": cases("exact", k_heads=V_HEADS)[:3],
        "heads-4": cases("exact", k_heads=1)[:3],
        "one-token-sequences": cases("gaussian", [1, 1, 1, 200 if not recurrent else 20]),
        "empty-last": cases("gaussian", [65, 0])[:5],
        "empty-first": cases("gaussian", [0, 65])[:5],
        "empty-middle": cases("gaussian", [64, 0, 65])[:5],
        "no-decay": cases("no-decay"),
        "zero-gates-mixed": gates(long),
        "tiny-decay": cases("tiny-decay")[:5],
        "identical-keys": cases("identical-keys")[:5],
        "parallel-keys": cases("parallel-keys")[:5],
    }


def call_of(case: Case) -> KernelCall:
    options = RunOptions(scale=case.options.scale, qk=case.options.qk, extra={"allow_empty": True})
    return KernelCall(tensors=case.tensors, options=options)


def judged(case: Case, result: Any, device: str) -> dict[str, Any]:
    """Relative RMS of the worst head of output and state, and whether every bit agrees."""
    if result.status != "ok":
        return {"status": result.status, "message": result.message}
    inputs = inputs_of(case, device)
    output, state = truth(**inputs.keywords())
    found = [result.outputs[name].to(device).double() for name in ("output", "final_state")]
    errors = []
    for got, wanted in zip(found, (output, state), strict=True):
        per_head = [
            ((got[:, h] - wanted[:, h]).square().mean() / wanted[:, h].square().mean().clamp_min(1e-30))
            .sqrt()
            .item()
            for h in range(wanted.shape[1])
        ]
        errors.append(max(per_head) if all(e == e for e in per_head) else float("nan"))
    exact = torch.equal(found[0], output) and torch.equal(found[1], state)
    return {"status": "ok", "output": errors[0], "state": errors[1], "exact": exact}


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One family in a few numbers; the first failure in words."""
    fine = [row for row in rows if row["status"] == "ok"]
    found: dict[str, Any] = {"cases": len(rows), "ok": len(fine), "exact": sum(row["exact"] for row in fine)}
    for key in ("output", "state"):
        values = [row[key] for row in fine]
        found[key] = "nan" if any(v != v for v in values) else max(values, default=None)
    other = next((row for row in rows if row["status"] != "ok"), None)
    if other is not None:
        found["first_other"] = f"{other['status']}: {other['message']}"
    return found


def slots(kernel: Any, recurrent: bool) -> dict[str, Any]:
    """A pool of NaN but for the owned rows, one sequence fresh in a stale slot: are the others untouched?"""
    case = make(
        "gaussian",
        lengths=[20, 9 if recurrent else 130],
        k_heads=2,
        v_heads=V_HEADS,
        dims=DIMS,
        state="random",
    )
    pool = torch.full((6, V_HEADS, *DIMS), float("nan"))
    pool[4], pool[1] = case["initial_state"][0], 1e30
    pooled = case.with_tensors(
        initial_state=None, pool=pool, slot_indices=torch.tensor([4, 1], dtype=torch.int32),
        has_initial_state=torch.tensor([True, False]),
    )  # fmt: skip
    result = kernel.run([call_of(pooled)])[0]
    if result.status != "ok":
        return {"status": result.status, "message": result.message}
    row = judged(pooled, result, "cpu")
    after = result.outputs.get("pool")
    if after is not None:
        bits = lambda x: x.cpu().contiguous().view(torch.int32)  # noqa: E731
        row["others_kept"] = all(torch.equal(bits(after[s]), bits(pool[s])) for s in (0, 2, 3, 5))
    return row


def layer(kernel: Any, device: str, tokens: int) -> dict[str, Any]:
    """The real layer's size: error, bits of a second run, seconds of a warm one."""
    case = make("qwen", lengths=[tokens], k_heads=16, v_heads=32, dims=DIMS, state="random")
    results = kernel.run([call_of(case)] * 4)
    row = judged(case, results[0], device)
    if all(result.status == "ok" for result in results):
        row["seconds"] = [result.seconds for result in results]
        row["same_bits"] = [
            torch.equal(r.outputs["output"], results[0].outputs["output"]) for r in results[1:]
        ]
        row["evidence"] = {
            k: v for k, v in results[-1].evidence.items() if k in ("launched", "backend", "instance")
        }
    return row


def measure(pool: WorkerPool, name: str, seeds: int, device: str, tokens: int) -> dict[str, Any]:
    kernel = pool.open(name)
    recurrent = ".recurrent" in name
    found: dict[str, Any] = {"environment": kernel.info.environment}
    for family, cases in families(seeds, recurrent).items():
        results = kernel.run([call_of(case) for case in cases])
        rows = [judged(case, result, device) for case, result in zip(cases, results, strict=True)]
        found[family] = summed(rows)
        print(f"{name} {family}: {found[family]}", flush=True)
    again = make("gaussian", lengths=[70], k_heads=2, v_heads=V_HEADS, dims=DIMS, state="random")
    runs = kernel.run([call_of(again)] * 20)
    same = [torch.equal(r.outputs["output"], runs[0].outputs["output"]) for r in runs if r.status == "ok"]
    found["run-to-run"] = {"runs": len(same), "same_bits": sum(same)}
    found["slots"] = slots(kernel, recurrent)
    found["layer"] = layer(kernel, device, 256 if recurrent else tokens)
    for part in ("run-to-run", "slots", "layer"):
        print(f"{name} {part}: {found[part]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernel", action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=LAYER_TOKENS)
    parser.add_argument("--cpu", action="store_true", help="try the script on Triton's interpreter")
    parser.add_argument("--name", default="h200-engines", help="of the result file")
    options = parser.parse_args()
    device = "cpu" if options.cpu else "cuda"
    found: dict[str, Any] = {}
    with WorkerPool(device=device, time_limit=300) as pool:
        for name in options.kernel or KERNELS:
            try:
                found[name] = measure(pool, name, options.seeds, device, options.tokens)
            except GdncheckError as error:
                found[name] = {"cannot_run": str(error)}
                print(f"{name}: {error}", flush=True)
    save(options.name, __file__, {"seeds": options.seeds, "kernels": found})


if __name__ == "__main__":
    main()
