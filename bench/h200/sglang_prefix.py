"""Where SGLang 0.5.23's chunk kernel departs on reading tokens: stage by stage against float64, on one GPU.

usage: python bench/h200/sglang_prefix.py [--seconds 120] [--out DIR] [--cpu]

On an H200 the relation `prefix-state` fired for sglang.chunk in 4 cases (h200-matrix.json): K tokens with
beta = 0, g = 0 and one-hot queries behind a sequence read its state, and what some heads read was off by 20
to 60 %, where fla's and vllm's kernels agree. The same call through Triton's interpreter is right, so the
source is. Here the calls are made again, each stage is judged from the tensors that it was really given,
under every configuration of the one tuned kernel, several times, on clean and on poisoned memory; whatever
departs, or moves, names the stage. The whole call through the adapter, with l2norm where the case has it,
and the same calls of fla.chunk@0.6.0 stand beside it.
Results: bench/results/h200-sglang-prefix.json, written anew after every configuration (and into --out).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
from gdncheck.capture.make import make
from gdncheck.compare.inputs import inputs_of
from gdncheck.compare.jsonout import plain_numbers
from gdncheck.compare.relations import prefix_state
from gdncheck.kernels import allocation, autotune, layouts, registry, tuning
from gdncheck.kernels.interface import KernelCall, RunOptions
from gdncheck.kernels.loading import load
from gdncheck.kernels.poison import Poison
from gdncheck.kernels.protocol import Open
from gdncheck.reference.truth import truth
from matrix import seeded_arguments
from record import save
from torch import Tensor

KERNEL, BESIDE = "sglang.chunk@0.5.23", "fla.chunk@0.6.0"
TUNED = "chunk_gated_delta_rule_fwd_kkt_solve_kernel"
CHUNK = 64
SEEDED = (48, 72)  # numbers of honest_cases that departed
QWEN = {
    "family": "qwen", "lengths": [100, 70], "k_heads": 2, "v_heads": 4, "dims": (128, 128),
    "state": "random",
}  # fmt: skip
CLOSE = 2.0**-5  # relative RMS of a (chunk, head): several roundings of bf16, far below what was seen


def cases(cpu: bool) -> dict[str, tuple[dict[str, Tensor], bool]]:
    """Name -> tensors of the call that reads, as the case has them, and whether q and k are raw."""
    drawn: dict[str, dict[str, Any]] = {f"seeded {n}": seeded_arguments(n, False) for n in SEEDED}
    drawn |= {"qwen": QWEN, "qwen, 8 keys": {**QWEN, "k_heads": 4, "v_heads": 8, "seed": 3}}
    if cpu:
        drawn = {"seeded 72": {**drawn["seeded 72"], "dims": (32, 32)}}
    found = {}
    for name, arguments in drawn.items():
        inputs = inputs_of(make(**arguments))
        (reading,) = prefix_state.plan(inputs, seed=0)
        x = reading.inputs
        tensors = {n: getattr(x, n) for n in ("q", "k", "v", "g", "beta", "cu_seqlens")}
        state = x.initial_state
        if state is None:
            n, heads = len(x.cu_seqlens) - 1, x.v.shape[1]
            state = torch.zeros(n, heads, x.q.shape[-1], x.v.shape[-1])
        found[name] = {**tensors, "initial_state": state.float()}, x.l2norm
    return found


def normalised(x: dict[str, Tensor], raw: bool) -> dict[str, Tensor]:
    """The same with q and k normalised and rounded."""
    return {**x, **{n: layouts.l2norm_rounded(x[n]) for n in ("q", "k")}} if raw else x


class Stages:
    """SGLang's stages one after the other, as its `chunk_gated_delta_rule_fwd` calls them."""

    def __init__(self, device: str) -> None:
        adapter, self.info, _ = load(Open(registry.resolve(KERNEL), device, ()))
        self.adapter, self.device = adapter, device
        folder = adapter.module.__name__.rpartition(".")[0]
        part = {name: import_module(f"{folder}.{name}") for name in
                ("cumsum", "chunk_fwd", "chunk_delta_h", "chunk_o", "index")}  # fmt: skip
        self.cumsum = part["cumsum"].chunk_local_cumsum
        self.intra = part["chunk_fwd"].chunk_gated_delta_rule_fwd_intra
        self.state = part["chunk_delta_h"].chunk_gated_delta_rule_fwd_h
        self.output = part["chunk_o"].chunk_fwd_o
        self.indices = part["index"].prepare_chunk_indices

    def run(self, x: dict[str, Tensor], pin: dict[str, Any] | None) -> dict[str, Tensor]:
        """Every stage's result, without the batch axis."""
        own = {name: tensor.clone().to(self.device) for name, tensor in x.items()}
        q, k, v, g = (own[n].unsqueeze(0) for n in ("q", "k", "v", "g"))
        beta, cu = own["beta"].float().unsqueeze(0), own["cu_seqlens"].to(torch.int32)
        pool = own["initial_state"].transpose(-1, -2).contiguous()
        slots = torch.arange(len(pool), dtype=torch.int32, device=self.device)
        with torch.no_grad(), autotune.pinned({} if pin is None else {TUNED: pin}, tune="never"):
            indices = self.indices(cu, CHUNK)
            summed = self.cumsum(g, chunk_size=CHUNK, cu_seqlens=cu, chunk_indices=indices)
            w, u, solved = self.intra(k=k, v=v, g=summed, beta=beta, cu_seqlens=cu, chunk_indices=indices)
            h, v_new = self.state(
                k=k, w=w, u=u, g=summed, initial_state=pool, initial_state_indices=slots, cu_seqlens=cu,
                chunk_indices=indices, inplace_update=True,
            )  # fmt: skip
            o = self.output(q=q, k=k, v=v_new, h=h, g=summed, scale=x["q"].shape[-1] ** -0.5, cu_seqlens=cu)
        found = {"cumsum": summed, "solve": solved, "w": w, "u": u, "h": h, "v_new": v_new, "output": o}
        return {name: tensor[0] for name, tensor in found.items()} | {"final": pool}

    def configurations(self, x: dict[str, Tensor]) -> list[dict[str, Any]]:
        self.run(x, None)
        return [tuning.configuration(config) for config in autotune.seen[TUNED][0].configs]


def judged(x: dict[str, Tensor], got: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Stage -> worst relative RMS of a (sequence, chunk, head), and where; each from its real inputs."""
    worst: dict[str, dict[str, Any]] = {}
    got = {name: tensor.double().cpu() for name, tensor in got.items()}
    x = {name: tensor.double() for name, tensor in x.items()}
    per_key = x["v"].shape[1] // x["k"].shape[1]
    scale, number = x["q"].shape[-1] ** -0.5, 0
    bounds = [int(n) for n in x["cu_seqlens"]]

    def note(stage: str, a: Tensor, b: Tensor, sequence: int, chunk: int, head: int) -> None:
        size = float(b.square().mean().sqrt())
        error = float((a - b).square().mean().sqrt())
        relative = error / size if size > 0 else (0.0 if error == 0 else float("inf"))
        known = worst.get(stage)
        if known is None or not relative <= known["relative"]:
            worst[stage] = {"relative": relative, "sequence": sequence, "chunk": chunk, "head": head}

    for sequence, (start, stop) in enumerate(pairwise(bounds)):
        for chunk, a in enumerate(range(start, stop, CHUNK)):
            b = min(a + CHUNK, stop)
            n = b - a
            for head in range(x["v"].shape[1]):
                key = head // per_key
                q, k, v = x["q"][a:b, key], x["k"][a:b, key], x["v"][a:b, head]
                beta, total = x["beta"][a:b, head], got["cumsum"][a:b, head]
                note("cumsum", total, x["g"][a:b, head].cumsum(0), sequence, chunk, head)
                below = torch.ones(n, n, dtype=torch.bool).tril(-1)
                decay = (
                    (total[:, None] - total[None])
                    .masked_fill(~(below | torch.eye(n).bool()), -torch.inf)
                    .exp()
                )
                kkt = torch.where(below, beta[:, None] * (k @ k.T) * decay, 0)
                solved = torch.linalg.inv(torch.eye(n).double() + kkt)
                note("solve", got["solve"][a:b, head, :n], solved, sequence, chunk, head)
                inverse = got["solve"][a:b, head, :n]
                note(
                    "w",
                    got["w"][a:b, head],
                    inverse @ (k * (beta * total.exp())[:, None]),
                    sequence,
                    chunk,
                    head,
                )
                note("u", got["u"][a:b, head], inverse @ (v * beta[:, None]), sequence, chunk, head)
                # Stored states are [V, K].
                h = got["h"][number + chunk, head].T
                if chunk == 0:
                    note("h", h, x["initial_state"][sequence, head], sequence, chunk, head)
                fresh = got["u"][a:b, head] - got["w"][a:b, head] @ h
                note("v_new", got["v_new"][a:b, head], fresh, sequence, chunk, head)
                left = (total[-1] - total).exp()[:, None] * got["v_new"][a:b, head]
                state = total[-1].exp() * h + k.T @ left
                last = b == stop
                after = got["final"][sequence, head].T if last else got["h"][number + chunk + 1, head].T
                note("final" if last else "h", after, state, sequence, chunk, head)
                scores = (q @ k.T) * decay
                wanted = scale * (total.exp()[:, None] * (q @ h) + scores @ got["v_new"][a:b, head])
                note("output", got["output"][a:b, head], wanted, sequence, chunk, head)
        number += -(-(stop - start) // CHUNK)
    return worst


def whole(x: dict[str, Tensor], output: Tensor) -> dict[str, float]:
    """The call's output at its reading tokens against the float64 truth: worst relative RMS of a head."""
    wanted, _ = truth(**x)
    rows = x["q"].shape[-1]
    ends = [int(n) for n in x["cu_seqlens"][1:]]
    worst = 0.0
    for end in ends:
        a, b = output[end - rows : end].double().cpu(), wanted[end - rows : end].double()
        worst = max(
            worst, float(((a - b).square().mean((0, 2)).sqrt() / b.square().mean((0, 2)).sqrt()).max())
        )
    return {"reading_tokens": worst}


def through(adapter: Any, x: dict[str, Tensor], raw: bool, device: str) -> dict[str, float]:
    """The whole call through an adapter."""
    tensors = {name: tensor.clone().to(device) for name, tensor in x.items()}
    options = RunOptions(qk="raw" if raw else "normalised")
    with torch.no_grad(), autotune.pinned({}, tune="never"):
        outputs = adapter.run(KernelCall(tensors=tensors, options=options))
    return whole(normalised(x, raw), outputs["output"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", help="folder that also gets the result")
    parser.add_argument("--cpu", action="store_true", help="try the script on Triton's interpreter")
    parser.add_argument("--name", default="h200-sglang-prefix", help="of the result file")
    options = parser.parse_args()
    started, device = time.monotonic(), "cpu" if options.cpu else "cuda"
    repeats = 1 if options.cpu else options.repeats
    stages = Stages(device)
    rows: list[dict[str, Any]] = []
    calls = cases(options.cpu)
    pins: list[dict[str, Any] | None] = [
        None,
        *stages.configurations(normalised(*next(iter(calls.values())))),
    ]
    pins = pins[:1] if options.cpu else pins
    for name, given in calls.items():
        x = normalised(*given)
        for pin in pins:
            for memory in ("clean", "nan"):
                if time.monotonic() - started > options.seconds:
                    break
                distinct: dict[str, list[Tensor]] = {}
                row: dict[str, Any] = {"case": name, "pin": pin, "memory": memory, "runs": 0, "departs": {}}
                for _ in range(repeats):
                    handlers = [Poison("nan")] if memory == "nan" else []
                    with allocation.fresh_buffers(handlers):
                        got = stages.run(x, pin)
                    row["runs"] += 1
                    for stage, tensor in got.items():
                        kinds = distinct.setdefault(stage, [])
                        if not any(torch.equal(tensor, kind) for kind in kinds):
                            kinds.append(tensor.clone())
                            found = judged(x, got).get(stage)
                            if found is not None and not found["relative"] <= CLOSE:
                                row["departs"].setdefault(stage, []).append(found)
                row["distinct"] = {stage: len(kinds) for stage, kinds in distinct.items()}
                row["worst"] = judged(x, got)
                row |= whole(x, got["output"])
                rows.append(row)
                told = ("case", "pin", "memory", "reading_tokens", "departs", "distinct")
                print({key: row[key] for key in told}, flush=True)
            path = save(options.name, __file__, plain_numbers({
                "rows": rows, "environment": stages.info.environment, "seconds": time.monotonic() - started,
            }))  # fmt: skip
            if options.out:
                shutil.copy(path, options.out)
    fla, _, _ = load(Open(registry.resolve(BESIDE), device, ()))
    others: dict[str, Any] = {}
    for kernel, adapter in ((KERNEL, stages.adapter), (BESIDE, fla)):
        runs = 1 if options.cpu else 5
        others[kernel] = {
            name: [through(adapter, x, raw, device) for _ in range(runs)] for name, (x, raw) in calls.items()
        }
        print(kernel, others[kernel], flush=True)
    path = save(options.name, __file__, plain_numbers({
        "rows": rows, "whole_calls": others, "environment": stages.info.environment,
        "seconds": time.monotonic() - started,
    }))  # fmt: skip
    if options.out:
        shutil.copy(path, options.out)


if __name__ == "__main__":
    main()
