"""Decode, verify, checkpoints, padded rows and heads of a rank on one GPU: rows 15, 16, 20, 25 to 28.

usage: python bench/h200/decode_verify.py [--seconds N] [--tiny] [--device cuda|cpu] [--part NAME]...
Resumable: every task has a name, its result is written to bench/results/h200-decode-verify.json at once, and
a task whose result is there is left out. What does not pass is printed in full.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("GDNCHECK_TUNE", "never")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import RESULTS, save  # noqa: I001

import torch

from gdncheck.capture.make import make
from gdncheck.compare.decode.drift import decode
from gdncheck.compare.diff import diff_case
from gdncheck.compare.inputs import call_of
from gdncheck.compare.relations import checkpoints, padded_rows, rank_slice
from gdncheck.compare.relations.run import answered, run_relation
from gdncheck.compare.session import Settings
from gdncheck.compare.trial import Trial
from gdncheck.compare.verify.speculation import prefill_for, speculate
from gdncheck.compare.witness import Witness
from gdncheck.kernels.interface import KernelCall, RunOptions
from gdncheck.kernels.pool import WorkerPool

NAME = "h200-decode-verify"
VERIFY = (
    "vllm.verify@0.19.1", "vllm.verify@0.33.0", "vllm.decode@0.19.1", "vllm.decode@0.33.0",
    "sglang.verify@0.5.23",
)  # fmt: skip
PACKED = ("vllm.packed-decode@0.19.1", "vllm.packed-decode@0.33.0", "sglang.packed-decode@0.5.23")
RECURRENT = (
    "vllm.recurrent@0.19.1", "vllm.recurrent@0.33.0", "sglang.recurrent@0.5.23", "sglang.decode@0.5.23",
)  # fmt: skip
CHUNK = (
    "fla.chunk@0.4.0", "fla.chunk@0.6.0", "vllm.chunk@0.19.1", "vllm.chunk@0.33.0", "sglang.chunk@0.5.23",
)  # fmt: skip
FLA = ("fla.recurrent@0.4.0", "fla.recurrent@0.6.0")
# What a padded row may look like, the promised ones and those that nobody promises.
PADDINGS: dict[str, dict[str, Any]] = {
    "handed on, empty": {"live": 3, "empty": True, "tail": "first"},
    "stale": {"live": 3}, "-1": {"live": 3, "tail": -1}, "0": {"live": 3, "tail": 0},
    "stale, empty": {"live": 3, "empty": True}, "-1, empty": {"live": 3, "tail": -1, "empty": True},
    "0, empty": {"live": 3, "tail": 0, "empty": True},
}  # fmt: skip


class Bench:
    """The tasks' results so far, and the workers that stay warm between them."""

    def __init__(self, pool: WorkerPool, *, tiny: bool, device: str) -> None:
        self.pool, self.tiny, self.device = pool, tiny, device
        self._handles: dict[str, Any] = {}
        path = RESULTS / f"{self.name}.json"
        self.rows: dict[str, Any] = json.loads(path.read_text())["rows"] if path.exists() else {}

    @property
    def name(self) -> str:
        return f"{NAME}-tiny" if self.tiny else NAME

    @property
    def shape(self) -> dict[str, Any]:
        """The real layer's heads, or few."""
        if self.tiny:
            return {"k_heads": 2, "v_heads": 4, "dims": (16, 16)}
        return {"k_heads": 16, "v_heads": 32, "dims": (128, 128)}

    def case(self, family: str, **more: Any) -> Any:
        return make(family, **{**self.shape, "state": "random", **more})

    def open(self, kernel: str) -> Any:
        """One worker per kernel for the whole run."""
        if kernel not in self._handles:
            self._handles[kernel] = self.pool.begin(kernel)
        return self._handles[kernel]

    def trial(self, kernel: str, case: Any) -> Trial | str:
        handle = self.open(kernel)
        call = call_of(case)
        first = answered(call, handle.run([call])[0])
        if first.status != "ok":
            return f"{first.status}: {first.message}"
        witness = Witness(case, device=self.device)
        return Trial(witness, handle.info, first.outputs["output"], first.outputs["final_state"])

    def relation(self, kernel: str, case: Any, name: str) -> dict[str, Any]:
        """All outcomes of one relation; the worst status is the row's."""
        trial = self.trial(kernel, case)
        if isinstance(trial, str):
            return {"verdict": trial}
        found = run_relation(self.open(kernel), trial, name, seed=0, steady=True)
        asked = [o for o in found if o.status != "not-applicable"]
        status = next((s for s in ("fires", "suspect", "ok") if any(o.status == s for o in asked)), "none")
        bad = [o.reason for o in found if o.status != "ok" and o.reason]
        return {"verdict": status, "outcomes": len(asked), "reason": "; ".join(bad)[:600],
                "numbers": [o.numbers for o in asked][:6]}  # fmt: skip


def padded(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Row 28: which slots a replayed batch with a padded row writes."""
    for kernel in (*PACKED, *RECURRENT, *FLA, "vllm.decode@0.19.1", "vllm.decode@0.33.0"):
        yield (
            f"padded rows promised, {kernel}",
            lambda kernel=kernel: bench.relation(
                kernel, bench.case("qwen", lengths=(5, 3)), padded_rows.NAME
            ),
        )
        for word, replay in PADDINGS.items():
            yield f"padded row {word}, {kernel}", lambda k=kernel, r=replay: replayed(bench, k, r)


def replayed(bench: Bench, kernel: str, replay: dict[str, Any]) -> dict[str, Any]:
    """Slots that changed, by whose they are."""
    case = bench.case("qwen", lengths=(5, 3))
    batch, pool = padded_rows.batch_of(Witness(case).inputs, 0)
    tensors = {n: getattr(batch, n).cpu() for n in ("q", "k", "v", "g", "beta", "cu_seqlens")}
    tensors |= {"pool": pool, "slot_indices": torch.tensor(padded_rows.SLOTS)}
    options = RunOptions(scale=batch.scale, qk=case.options.qk, extra={"replay": replay})
    result = bench.open(kernel).run([KernelCall(tensors=tensors, options=options)])[0]
    if result.status != "ok":
        return {"verdict": result.status, "reason": result.message}
    moved = (result.outputs["pool"].cpu() != pool).flatten(1).any(-1).nonzero().flatten().tolist()
    live, old = padded_rows.SLOTS[:3], padded_rows.SLOTS[3]
    words = {s: "live" if s in live else "padded row's" if s == old else "nobody's" for s in moved}
    return {
        "verdict": "ok" if set(moved) == set(live) else "writes", "slots": words,
        "graph_replayed": bool(result.evidence.get("graph_replayed")),
    }  # fmt: skip


def steps(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Row 26: single verify steps of every draft length."""
    for kernel in VERIFY:
        for draft in (1, 3) if bench.tiny else range(1, 9):
            for family in ("qwen", "exact"):
                yield (
                    f"verify step, draft {draft}, {family}, {kernel}",
                    lambda k=kernel, d=draft, f=family: one_step(bench, k, d, f),
                )


def one_step(bench: Bench, kernel: str, draft: int, family: str) -> dict[str, Any]:
    lengths = (1 + draft, 1, max(1, draft // 2), 1 + draft)
    case = bench.case(family, lengths=lengths, draft=draft, seed=draft)
    handle = bench.open(kernel)
    _, (result,) = diff_case(
        case, [handle], Settings(), asked=True, device=bench.device, say=lambda text: None
    )
    ruling = result.ruling
    return {
        "verdict": ruling.verdict,
        "reason": ruling.reason[:600],
        "error": ruling.error,
        "ratio": ruling.ratio,
    }


def chains(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Row 26: chains of steps through the kernel's own pool."""
    for kernel in VERIFY:
        for dtype in ("float32", "bfloat16"):
            for draft in (2,) if bench.tiny else (1, 3, 8):
                yield (
                    f"chain, draft {draft}, state {dtype}, {kernel}",
                    lambda k=kernel, d=draft, t=dtype: chain(bench, k, d, t),
                )


def chain(bench: Bench, kernel: str, draft: int, dtype: str) -> dict[str, Any]:
    case = bench.case("qwen", lengths=(9, 6, 12), seed=draft)
    found = speculate(
        bench.open(kernel), bench.open(prefill_for(kernel)), case, draft=draft,
        steps=2 if bench.tiny else 6, prompt=5 if bench.tiny else 70, state_dtype=dtype, seed=draft,
        device=bench.device,
    )  # fmt: skip
    return {
        "verdict": found.verdict, "reason": found.ruling.reason[:600], "drafted": found.drafted,
        "accepted": found.accepted, "failed_turn": found.failed_turn, "ratio": found.ruling.ratio,
    }  # fmt: skip


def stored(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Row 27: states at the starts of chunks."""
    packings = ((100, 70),) if bench.tiny else ((500, 700, 900), (64, 65, 63, 130), (1, 2000))
    for kernel in CHUNK:
        for lengths in packings:
            for family in ("qwen", "exact"):
                yield (
                    f"checkpoints, {lengths}, {family}, {kernel}",
                    lambda k=kernel, n=lengths, f=family: bench.relation(
                        k, bench.case(f, lengths=n, v_heads=4, k_heads=2), checkpoints.NAME
                    ),
                )


def ranks(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Row 20: heads of one rank of 2, 4, 8."""
    for kernel in (*CHUNK, *FLA, *RECURRENT, *PACKED, "vllm.decode@0.33.0"):
        lengths = (3, 1) if bench.tiny or "chunk" not in kernel else (300, 64)
        lengths = (130,) if bench.tiny and "chunk" in kernel else lengths
        heads = {"k_heads": 4, "v_heads": 8} if bench.tiny else {}
        yield (
            f"rank slice, {kernel}",
            lambda k=kernel, n=lengths, h=heads: bench.relation(
                k, bench.case("qwen", lengths=n, **h), rank_slice.NAME
            ),
        )


def drifts(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Rows 15 and 16: thousands of steps under each rounding profile; row 25: a very long context."""
    profiles: dict[str, dict[str, Any]] = {
        "states": {"state_dtypes": ("fp32", "bf16", "fp16")},
        "beta": {"beta_dtypes": ("fp32", "bf16")},
        "l2norm": {"l2norm": ("in_kernel", "before")},
    }
    kernels = (*FLA[:1], "vllm.decode@0.33.0", *PACKED)
    for word, options in profiles.items():
        chosen = kernels if word == "states" else kernels[-2:]
        yield f"drift, {word}", lambda w=word, o=options, k=chosen: drift(bench, w, k, o)
    # The honest runs of a token-by-token kernel are loops over tokens: nine of them, seconds each.
    for kernel, tokens in (("fla.chunk@0.4.0", 131072), ("fla.recurrent@0.4.0", 16384)):
        yield f"long context, {tokens} tokens, {kernel}", lambda k=kernel, n=tokens: long_context(bench, k, n)


def drift(bench: Bench, word: str, kernels: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    raw: dict[str, Any] = {"qk": "raw"} if word == "l2norm" else {}
    heads = {} if bench.tiny else {"k_heads": 4, "v_heads": 8}
    case = bench.case("qwen", lengths=(256,), beta_dtype="fp32", seed=16, **heads, **raw)
    report = decode(
        case, kernels=kernels[1:2] if bench.tiny else kernels, steps=24 if bench.tiny else 4096,
        device=bench.device, time_limit=120, **options,
    )  # fmt: skip
    return {"verdict": report.verdict, "drifts": [curve(d) for d in report.drifts]}


def long_context(bench: Bench, kernel: str, tokens: int) -> dict[str, Any]:
    case = bench.case("qwen", lengths=(512,), k_heads=1, v_heads=1, seed=25)
    slow = case.with_tensors(g=torch.full_like(case["g"], -1e-4))
    report = decode(
        slow, kernels=[kernel], steps=128 if bench.tiny else tokens, whole=True, device=bench.device,
        time_limit=120,
    )  # fmt: skip
    return {"verdict": report.verdict, "drifts": [curve(d) for d in report.drifts]}


def curve(drift: Any) -> dict[str, Any]:
    points = {
        p.step: {"pure": p.pure, "own": p.state, "honest": p.honest, "bound": p.bound} for p in drift.points
    }
    return {"kernel": drift.kernel, "profile": drift.profile.text, "verdict": drift.verdict,
            "reason": drift.ruling.reason[:400], "seconds": drift.seconds, "points": points}  # fmt: skip


USED: dict[str, tuple[str, ...]] = {
    "padded": (*PACKED, *RECURRENT, *FLA, "vllm.decode@0.19.1", "vllm.decode@0.33.0"), "steps": VERIFY,
    "chains": (*VERIFY, *CHUNK[2:]), "stored": CHUNK, "ranks": (*CHUNK, *FLA, *RECURRENT, *PACKED),
    "drifts": (),
}  # fmt: skip
PARTS = {
    "padded": padded,
    "steps": steps,
    "chains": chains,
    "stored": stored,
    "ranks": ranks,
    "drifts": drifts,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=350.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--part", action="append", choices=sorted(PARTS))
    asked = parser.parse_args()
    started = time.monotonic()
    with WorkerPool(device=asked.device, time_limit=120) as pool:
        bench = Bench(pool, tiny=asked.tiny, device=asked.device)
        parts = asked.part or list(PARTS)
        for kernel in dict.fromkeys(k for part in parts for k in USED[part]):
            bench.open(kernel)  # all workers start and load side by side
        for part in parts:
            for name, task in PARTS[part](bench):
                if name in bench.rows:
                    continue
                if time.monotonic() - started > asked.seconds:
                    print(f"{asked.seconds:.0f} s are over at: {name}; run again to go on", flush=True)
                    return
                begun = time.monotonic()
                try:
                    row = task()
                except Exception as error:  # one kernel's trouble must not cost the others' results
                    row = {"verdict": "error", "reason": f"{type(error).__name__}: {error}"[:600]}
                bench.rows[name] = {**row, "seconds_all": round(time.monotonic() - begun, 2)}
                save(bench.name, __file__, {"rows": bench.rows})
                bad = row["verdict"] not in ("pass", "ok")
                print(f"{time.monotonic() - started:6.1f} s  {row['verdict']:8} {name}", flush=True)
                if bad:
                    print(f"          {row.get('reason') or row.get('slots')}", flush=True)


if __name__ == "__main__":
    main()
