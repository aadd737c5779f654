"""The kkt stage of one package in this process: every configuration pinned, repeated and judged.

A child of autotune_kkt.py; it writes one JSON line per finished block into its part file, so that a run
that was cut short goes on where it stopped. Blocks: (dtype of beta, dtype of g, tokens) for the pins, and
one fresh tuning at a length.

kkt is judged against float64 entry by entry: |A - A64| <= beta |k_i||k_j| exp(G_i - G_j) times the round-off
of what the package rounds (k * beta to bf16 in vLLM's copy, nothing in FLA's), plus the accumulation's.
The fused kkt + solve of FLA 0.6.0 is judged by its inverse, RMS per (chunk, head).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gdncheck.kernels import allocation, autotune, registry, tuning
from gdncheck.kernels.loading import load
from gdncheck.kernels.poison import Poison
from gdncheck.kernels.protocol import Open
from torch import Tensor

KEY_HEADS, VALUE_HEADS, DIM, CHUNK = 16, 32, 128, 64
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# What g's dtype means: the gate before its cumulative sum (engines keep the sum in float32), or the sum
# itself, which no engine hands over and some kernels cannot compile.
GATES = ("fp32", "bf16", "bf16-summed")
TUNED_AT = (16, 32, 64)
LOG2_E = 1.4426950408889634
KEPT = 48  # distinct outputs of one block that are told apart; a kernel that moves in every run has more
OTHERS = -1
UNJUDGED = {"worst": 0.0, "wrong": False, "note": f"not judged: the block had {KEPT} distinct outputs before"}
LOST = 9  # exit status of a child whose GPU context was lost; the next one goes on behind that block
RMS_LIMIT = 2.0**-7  # of the fused inverse, per tile: bf16 output, tf32 merges


@dataclass(frozen=True)
class Target:
    """A package's kkt: which kernel it launches, and what is particular about it."""

    kernel: str
    """As `gdncheck kernels` names it."""
    triton_name: str
    fused: bool = False
    base2: bool = False
    """The gate is handed over to base 2."""
    expands_heads: bool = False
    rounds_k_beta: bool = False


TARGETS = {
    "vllm-0.19.1": Target("vllm.chunk@0.19.1", "chunk_scaled_dot_kkt_fwd_kernel", rounds_k_beta=True),
    "fla-0.4.0": Target("fla.chunk@0.4.0", "chunk_scaled_dot_kkt_fwd_kernel", expands_heads=True),
    "fla-0.6.0": Target("fla.chunk@0.6.0", "chunk_scaled_dot_kkt_fwd_kernel", base2=True),
    "fla-0.6.0-fused": Target(
        "fla.chunk@0.6.0", "chunk_gated_delta_rule_fwd_kkt_solve_kernel", fused=True, base2=True
    ),
}


class Stage:
    """One target loaded in this process."""

    def __init__(self, name: str, device: str) -> None:
        self.target, self.device = TARGETS[name], device
        spec = registry.resolve(self.target.kernel)
        adapter, self.info, _ = load(Open(spec, device, ()))
        wanted = "chunk_gated_delta_rule_fwd_intra" if self.target.fused else "chunk_scaled_dot_kkt_fwd"
        if self.target.kernel.startswith("vllm"):
            from gdncheck.kernels.engine_stages import VllmStages

            self.function = VllmStages(adapter.folder, adapter.version).stage(wanted)
        else:
            self.function = adapter.package_module.stage(wanted)
        self.offsets = torch.int32 if self.target.kernel.startswith("vllm") else torch.int64

    def __call__(self, x: dict[str, Tensor], pin: dict[str, Any] | None) -> Tensor:
        """A [T, HV, C], or the inverse where it is fused; pin None lets the tuner choose."""
        arguments = {name: x[name].unsqueeze(0) for name in ("k", "g", "beta")}
        if self.target.fused:
            arguments["v"] = x["v"].unsqueeze(0)
        pins = {} if pin is None else {self.target.triton_name: pin}
        others = {autotune.ANY: {}} if pin is not None else {}
        with autotune.pinned({**others, **pins}):
            returned = self.function(**arguments, cu_seqlens=x["cu_seqlens"], chunk_size=CHUNK)
        return (returned[2] if self.target.fused else returned)[0]

    @property
    def tuner(self) -> Any:
        return autotune.seen[self.target.triton_name][0]

    def configurations(self, x: dict[str, Tensor]) -> list[dict[str, Any]]:
        """All of them; one launch of the first is enough to see the tuner."""
        self(x, {})
        return [tuning.configuration(config) for config in self.tuner.configs]


def inputs(stage: Stage, tokens: int, beta: str, gate: str) -> dict[str, Tensor]:
    """Unit keys, sigmoid beta and gates as in a Qwen layer (log decay 1e-3 to 2), G summed per chunk."""
    draw = torch.Generator().manual_seed(tokens)
    k = torch.randn(tokens, KEY_HEADS, DIM, generator=draw)
    k = (k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()).to(torch.bfloat16)
    logits = torch.randn(tokens, VALUE_HEADS, generator=draw)
    g = -torch.exp(torch.empty(VALUE_HEADS).uniform_(-7, 0.7, generator=draw)) * torch.rand(
        tokens, VALUE_HEADS, generator=draw
    )
    if gate != "fp32":
        g = g.to(torch.bfloat16)
    summed = chunks(g.double()).cumsum(1).flatten(0, 1)[:tokens]
    if stage.target.base2:
        summed = summed * LOG2_E
    made = {
        "k": k.repeat_interleave(VALUE_HEADS // KEY_HEADS, 1) if stage.target.expands_heads else k,
        "v": torch.randn(tokens, VALUE_HEADS, DIM, generator=draw).to(torch.bfloat16),
        "g": summed.to(torch.bfloat16 if gate == "bf16-summed" else torch.float32),
        "beta": logits.sigmoid().to(DTYPES[beta]),
        "cu_seqlens": torch.tensor([0, tokens], dtype=stage.offsets),
    }
    return {name: tensor.contiguous().to(stage.device) for name, tensor in made.items()}


def chunks(x: Tensor) -> Tensor:
    """[T, ...] as [chunks, C, ...], zeros in the tail."""
    padded = torch.zeros(-(-len(x) // CHUNK) * CHUNK, *x.shape[1:], dtype=x.dtype, device=x.device)
    padded[: len(x)] = x
    return padded.unflatten(0, (-1, CHUNK))


class Judge:
    """Float64 values of one block, on the device, and how far an output may be from them."""

    def __init__(self, stage: Stage, x: dict[str, Tensor]) -> None:
        self.fused, self.tokens = stage.target.fused, len(x["k"])
        base = 1.0 if not stage.target.base2 else 1 / LOG2_E
        k = x["k"].double()
        k = k.repeat_interleave(VALUE_HEADS // k.shape[1], 1)
        base_e = x["g"].double() * base
        # [chunks, HV, C, K] and [chunks, HV, C]
        k, beta, g = (chunks(t).transpose(1, 2) for t in (k, x["beta"].double(), base_e))
        below = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=k.device).tril(-1)
        difference = (g[..., :, None] - g[..., None, :]).masked_fill(~below, 0)
        scale = beta[..., None] * difference.exp() * below
        self.wanted = scale * (k @ k.transpose(-1, -2))  # [chunks, HV, C, C]
        rounding = (2.0**-8 if stage.target.rounds_k_beta else 0.0) + 2 * DIM * 2.0**-24
        rounding = rounding + (1 + difference.abs()) * 2.0**-20
        norms = k.norm(dim=-1)
        self.limit = scale * norms[..., :, None] * norms[..., None, :] * rounding + 2.0**-126
        if self.fused:
            identity = torch.eye(CHUNK, dtype=torch.float64, device=k.device)
            self.wanted = torch.linalg.solve_triangular(self.wanted + identity, identity, upper=False)
            self.limit = None

    def __call__(self, output: Tensor) -> dict[str, Any]:
        """`worst`: largest error over its limit; `wrong`; the first place where it is above."""
        got = chunks(output.double()).transpose(1, 2)
        # Rows beyond the sequence are nobody's.
        valid = torch.arange(len(got) * CHUNK, device=got.device).view(-1, 1, CHUNK, 1) < self.tokens
        error = torch.where(valid, (got - self.wanted).abs(), 0)
        if self.limit is None:
            tile = self.wanted.square().mean((-1, -2), keepdim=True).sqrt()
            over = error.square().mean((-1, -2), keepdim=True).sqrt() / (tile * RMS_LIMIT)
            over = over.expand_as(error)
        else:
            over = error / self.limit
        over = torch.where(over.isfinite(), over, torch.inf)
        relative = (error.square().sum() / (self.wanted * valid).square().sum().clamp_min(1e-300)).sqrt()
        found = {"worst": float(over.max()), "relative_rms": float(relative),
                 "nonfinite": int((~output.isfinite()).sum())}  # fmt: skip
        found["wrong"] = not found["worst"] <= 1
        if found["wrong"]:
            chunk, head, row, column = (over > 1).nonzero()[0].tolist()
            found["entries"] = int((over > 1).sum())
            found["place"] = {"token": chunk * CHUNK + row, "head": head, "column": column}
        return found


def repeated(stage: Stage, x: dict[str, Tensor], pin: dict[str, Any], repeats: int, outputs: list[Tensor],
             busy: Any) -> dict[str, Any]:  # fmt: skip
    """One configuration `repeats` times, half of them beside a busy stream; which outputs came how often."""
    counts: dict[int, int] = {}
    for number in range(repeats):
        if busy is not None and number >= repeats // 2:
            busy()
        with allocation.fresh_buffers([Poison("nan")]):
            output = stage(x, pin)
        bits = output.view(torch.int32 if output.dtype == torch.float32 else torch.int16)
        same = next((i for i, known in enumerate(outputs) if torch.equal(bits, known)), None)
        if same is None and len(outputs) < KEPT:
            same = len(outputs)
            outputs.append(bits.clone())
        same = OTHERS if same is None else same
        counts[same] = counts.get(same, 0) + 1
    return {"status": "ok", "runs": repeats, "distinct": len(counts) + (OTHERS in counts), "outputs": counts}


def busy_stream(device: str) -> Any:
    """Something for the other multiprocessors to do; None without a GPU."""
    if device != "cuda":
        return None
    stream, square = torch.cuda.Stream(), torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)

    def work() -> None:
        with torch.cuda.stream(stream):
            for _ in range(4):
                torch.mm(square, square)

    return work


class ContextLost(Exception):
    """A launch took the GPU context along; holds the rows of its block up to and with that launch."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        super().__init__("the CUDA context is lost")
        self.rows = rows


def is_lost(device: str) -> bool:
    """Whether every later call on the device would fail too."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def block(stage: Stage, tokens: int, beta: str, gate: str, repeats: int) -> list[dict[str, Any]]:
    """Every configuration on one input."""
    x = inputs(stage, tokens, beta, gate)
    judge, busy = Judge(stage, x), busy_stream(stage.device)
    outputs: list[Tensor] = []
    rulings: dict[int, dict[str, Any]] = {}
    rows = []
    for pin in stage.configurations_known:
        row = {"kind": "pin", "beta": beta, "g": gate, "tokens": tokens, "configuration": pin}
        try:
            row |= repeated(stage, x, pin, repeats, outputs, busy)
        except Exception as error:
            failed = autotune.is_compile_failure(error)
            message = " ".join(f"{type(error).__name__}: {error}".split())[-300:]
            row |= {"status": "compile failure" if failed else "error", "message": message}
            rows.append(row)
            if not failed and is_lost(stage.device):
                raise ContextLost(rows) from error
            continue
        for number in row["outputs"]:
            if number not in rulings and number != OTHERS:
                dtype = torch.float32 if outputs[number].dtype == torch.int32 else torch.bfloat16
                rulings[number] = judge(outputs[number].view(dtype))
        seen = [rulings[n] for n in row["outputs"] if n != OTHERS]
        worst = max(seen, key=lambda r: r["worst"], default=UNJUDGED)
        # A sum in bf16 is a different function: its repeats count, its error is only recorded.
        judged = gate != "bf16-summed" and bool(seen)
        rows.append(row | worst | {"wrong": judged and worst["wrong"], "judged": judged})
    return rows


def tune(stage: Stage, tokens: int) -> dict[str, Any]:
    """One fresh tuning at a length, as an engine's warm-up does it: bf16 beta, float32 sum."""
    x = inputs(stage, tokens, "bf16", "fp32")
    autotune.forget(stage.tuner)
    started = time.monotonic()
    stage(x, None)
    best = stage.tuner.best_config
    return {
        "kind": "tuning", "tokens": tokens, "pick": tuning.configuration(best),
        "seconds": time.monotonic() - started, "over_best": tuning.timings_over_best(stage.tuner),
    }  # fmt: skip


def compile_share(stage: Stage, share: int, shares: int) -> None:
    """Compile every share-th (configuration, dtypes), for the disk cache that the measuring process reads."""
    first = inputs(stage, CHUNK, "bf16", "fp32")
    pins = stage.configurations(first)
    wanted = list(product(DTYPES, ("fp32", "bf16-summed"), pins))
    for beta, gate, pin in wanted[share::shares]:
        try:
            stage(inputs(stage, CHUNK, beta, gate), pin)
        except Exception as error:  # the measuring process meets it again and records it
            if not autotune.is_compile_failure(error):
                print(f"{pin}: {type(error).__name__}: {error}", file=sys.stderr)


def measure(stage: Stage, options: argparse.Namespace) -> None:
    """Blocks until the deadline, each written as it ends; those in the part file are not done again."""
    part = Path(options.part)
    done = {tuple(line["block"]) for line in lines_of(part)}
    tunings = sum(line["block"][0] == "tuning" for line in lines_of(part))
    deadline = time.monotonic() + options.seconds
    stage.configurations_known = stage.configurations(inputs(stage, CHUNK, "bf16", "fp32"))
    facts = {"environment": stage.info.environment, "tuner": tuning.tuner_facts(
        *autotune.seen[stage.target.triton_name])}  # fmt: skip
    if ("facts",) not in done:
        append(part, ["facts"], [facts])
    blocks = [(t, b, g) for t in options.tokens for b in DTYPES for g in GATES]
    for tokens, beta, gate in blocks:
        if time.monotonic() > deadline:
            return
        if ("pins", tokens, beta, gate) not in done:
            try:
                rows = block(stage, tokens, beta, gate, options.repeats)
            except ContextLost as lost:
                append(part, ["pins", tokens, beta, gate], lost.rows)
                sys.exit(LOST)
            append(part, ["pins", tokens, beta, gate], rows)
    if stage.device != "cuda":
        return
    lengths = (*TUNED_AT, max(options.tokens))
    while time.monotonic() < deadline and tunings < options.tunings * len(lengths):
        append(part, ["tuning", tunings], [tune(stage, lengths[tunings % len(lengths)])])
        tunings += 1


def lines_of(part: Path) -> list[dict[str, Any]]:
    """Finished blocks of a part file; a last line that was cut short does not count."""
    if not part.exists():
        return []
    whole = part.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def append(part: Path, name: list[Any], rows: list[dict[str, Any]]) -> None:
    with part.open("a") as file:
        file.write(json.dumps({"block": name, "rows": rows}) + "\n")
    wrong = [r for r in rows if r.get("wrong") or r.get("distinct", 1) > 1 or r.get("status") == "error"]
    print(f"{part.stem} {name}: {len(rows)} rows, {len(wrong)} wrong or moving", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["compile", "measure"])
    parser.add_argument("target", choices=list(TARGETS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--share", type=int, default=0)
    parser.add_argument("--shares", type=int, default=1)
    parser.add_argument("--part", default="")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--tunings", type=int, default=20)
    parser.add_argument("--tokens", type=int, nargs="+")
    options = parser.parse_args()
    stage = Stage(options.target, options.device)
    if options.what == "compile":
        compile_share(stage, options.share, options.shares)
    else:
        measure(stage, options)


if __name__ == "__main__":
    main()
