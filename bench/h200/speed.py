"""What the float64 side costs on a GPU, against the kernels and against the limit of the arithmetic.

usage: python bench/h200/speed.py [--part NAME]... [--tokens 11686] [--device cpu]

- truth: truth, chunk form and recurrence at the real layer's size;
- kernels: FLA's chunk kernel at that size, by events, and the truth over it;
- emulation: with all cast points, over the float64 chunk form;
- growth: truth over T at 32 heads and over heads at T = 65,536, exponents by least squares;
- long: one `diff` of 300,000 tokens at 32 heads, its time and the GPU memory that it takes;
- peers: FLA's naive recurrence and transformers' torch function on the same case.

Results: bench/results/h200-speed.json, each part written as it ends and not done again.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import RESULTS, save, spread, timed  # noqa: I001

from gdncheck.capture.case import Case
from gdncheck.compare.diff import diff_case
from gdncheck.compare.session import Settings
from gdncheck.kernels.cache import cache_root
from gdncheck.kernels.pool import WorkerPool
from gdncheck.reference.chunk import chunk_form
from gdncheck.reference.emulation import emulate_chunk
from gdncheck.reference.recurrence import recurrence
from gdncheck.reference.truth import truth

FLA = ("0.4.0", "0.6.0")
LONG = 300_000


def prompt(tokens: int, device: str, heads: int = 32, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Unit keys, Gaussian q and v, decay and strength as a trained layer has them; half as many key heads."""
    make = torch.Generator(device).manual_seed(tokens + heads)
    keys = max(1, heads // 2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=make)

    q, k = (torch.nn.functional.normalize(normal(tokens, keys, 128), dim=-1).to(dtype) for _ in range(2))
    uniform = torch.rand(2, tokens, heads, device=device, generator=make)
    return {
        "q": q, "k": k, "v": normal(tokens, heads, 128).to(dtype), "g": 0.1 * (1 - uniform[0]).log(),
        "beta": uniform[1],
    }  # fmt: skip


def truth_part(tokens: int, device: str) -> dict[str, Any]:
    x = prompt(tokens, device)
    seconds = {
        name: spread(timed(lambda form=form: form(**x), repeats))
        for name, form, repeats in (
            ("truth", truth, 15),
            ("chunk_form", chunk_form, 15),
            ("recurrence", recurrence, 3),
        )
    }
    return {
        "seconds": seconds,
        "recurrence_over_truth": seconds["recurrence"]["median"] / seconds["truth"]["median"],
    }


def kernels_part(tokens: int, device: str) -> dict[str, Any]:
    """FLA's kernels, timed by events in processes of their own; the ratio is made with the part `truth`."""
    return {version: spread(kernel_seconds(version, tokens)) for version in FLA} if device == "cuda" else {}


def kernel_seconds(version: str, tokens: int) -> list[float]:
    """Times of FLA's kernel, measured by `kernel_time` with that version's folder on its path."""
    folder = cache_root() / "kernels" / "fla" / version
    script = Path(__file__).with_name("kernel_time.py")
    command = [sys.executable, str(script), str(folder), "--tokens", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    return json.loads(done.stdout.splitlines()[-1])


def emulation_part(tokens: int, device: str) -> dict[str, Any]:
    x = prompt(tokens, device)
    forms: dict[str, Callable[[], Any]] = {"chunk_form": lambda: chunk_form(**x), "truth": lambda: truth(**x)}
    for profile in ("fla-0.4", "fla-0.6", "vllm-0.19", "flashinfer-0.6"):
        forms[profile] = functools.partial(emulate_chunk, **x, precision=profile)
    seconds = {name: spread(timed(form, 5)) for name, form in forms.items()}
    over = {name: s["median"] / seconds["chunk_form"]["median"] for name, s in seconds.items()}
    return {"seconds": seconds, "over_chunk_form": over}


def growth_part(tokens: int, device: str) -> dict[str, Any]:
    lengths = [1 << n for n in range(10, 19)] if device == "cuda" else [256, 512, 1024]
    heads = [1, 2, 4, 8, 16, 32, 64] if device == "cuda" else [1, 2, 4]
    by_length = {n: truth_seconds(prompt(n, device)) for n in lengths}
    # At a prompt's length few heads leave a GPU idle, and time does not grow with them: so a longer one.
    of_heads = 65_536 if device == "cuda" else tokens
    by_heads = {n: truth_seconds(prompt(of_heads, device, n)) for n in heads}
    return {
        "seconds_by_tokens": by_length, "seconds_by_heads": by_heads, "tokens_of_heads": of_heads,
        # Where launches cost more than arithmetic nothing grows; so the upper half of each.
        "exponent_of_tokens": exponent(by_length), "exponent_of_heads": exponent(by_heads),
    }  # fmt: skip


def truth_seconds(x: dict[str, Any]) -> float:
    return statistics.median(timed(lambda: truth(**x), 3))


def exponent(seconds: dict[int, float]) -> float:
    """Slope of log(time) over log(size) in the upper half, by least squares."""
    points = [(math.log(n), math.log(s)) for n, s in seconds.items()][len(seconds) // 2 :]
    mean_x, mean_y = (statistics.fmean(column) for column in zip(*points, strict=True))
    square = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / square


def long_part(tokens: int, device: str) -> dict[str, Any]:
    length = LONG if device == "cuda" else 300
    tensors = {name: x.cpu() for name, x in prompt(length, device).items()}
    case = Case(tensors={**tensors, "cu_seqlens": torch.tensor([0, length])})
    kernel = "fla.chunk@0.6.0" if device == "cuda" else "emulation.chunk"
    with WorkerPool(device=device, time_limit=300) as pool:
        handle = pool.open(kernel, environment={"GDNCHECK_TUNE": "never"})
        started = time.perf_counter()
        _, results = diff_case(
            case, [handle], Settings(relations="none"), asked=True, device=device, say=print
        )
        seconds = time.perf_counter() - started
    ruling = results[0].ruling
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {
        "tokens": length, "seconds": seconds, "verdict": ruling.verdict, "reason": ruling.reason,
        "judge_gpu_peak_bytes": peak,
    }  # fmt: skip


def peers_part(tokens: int, device: str) -> dict[str, Any]:
    """Seconds on one case of 1,024 tokens and 8 heads: who else could be the reference, and how far off."""
    n = 1024 if device == "cuda" else 128
    x = prompt(n, device, 8)
    forms: dict[str, Callable[[], Any]] = {
        "truth": lambda: truth(**x)[0],
        "recurrence": lambda: recurrence(**x)[0],
    }
    batched = {name: t.unsqueeze(0) for name, t in x.items()}
    batched |= {name: batched[name].repeat_interleave(2, dim=2) for name in ("q", "k")}
    missing = {}
    try:
        sys.path.insert(0, str(cache_root() / "kernels" / "fla" / "0.6.0"))
        from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule as naive

        forms["fla naive recurrence"] = lambda: naive(**batched)[0]
    except ImportError as error:
        missing["fla naive recurrence"] = str(error)
    try:
        from transformers.models.qwen3_next.modeling_qwen3_next import (
            torch_chunk_gated_delta_rule as torch_rule,
        )

        forms["transformers torch function"] = lambda: torch_rule(
            batched["q"],
            batched["k"],
            batched["v"],
            g=batched["g"],
            beta=batched["beta"],
            output_final_state=True,
        )[0]
    except ImportError as error:
        missing["transformers torch function"] = str(error)
    expected = recurrence(**x)[0]
    rows = {}
    for name, form in forms.items():
        got = form().double().reshape(expected.shape)
        error = float((got - expected).norm() / expected.norm())
        rows[name] = {"seconds": spread(timed(form, 5)), "relative_error": error}
    return {"tokens": n, "heads": 8, "rows": rows, "not_here": missing}


PARTS = {
    "truth": truth_part, "emulation": emulation_part, "peers": peers_part, "growth": growth_part,
    "kernels": kernels_part, "long": long_part,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", action="append", choices=list(PARTS))
    parser.add_argument("--tokens", type=int, default=11_686)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--name", default="h200-speed")
    options = parser.parse_args()
    path = RESULTS / f"{options.name}.json"
    found = json.loads(path.read_text())["parts"] if path.exists() else {}
    for name in options.part or PARTS:
        if name in found:
            continue
        try:
            found[name] = PARTS[name](options.tokens, options.device)
        except Exception as error:  # one part that cannot run must not end the others; it is told
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue
        if found.get("kernels") and "truth" in found:
            median = found["truth"]["seconds"]["truth"]["median"]
            found["truth_over_kernel"] = {v: median / s["median"] for v, s in found["kernels"].items()}
        save(options.name, __file__, {"tokens": options.tokens, "parts": found})
        print(name, json.dumps(found[name])[:800], flush=True)


if __name__ == "__main__":
    main()
