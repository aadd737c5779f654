"""Operations around the rule, and whole cores, on a GPU: every kernel on synthetic cores, saved after each.

usage: python bench/h200/ops.py [--seconds 600] [--out FILE] [--tokens 2048] [--device cuda]
       [--kernel NAME ...]

Run again to go on where it stopped: what the file holds is not run again. A kernel's name says its operation;
`FAMILY.core` is a chain. Sizes are those of Qwen3.5-35B-A3B unless --heads and --dims say otherwise.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import msgspec
from gdncheck.capture.atomic import atomic_path
from gdncheck.capture.errors import GdncheckError
from gdncheck.capture.synthetic.core import make_core
from gdncheck.compare.jsonout import plain_numbers
from gdncheck.compare.ops.diff import diff_ops

KERNELS = (
    "fla.gate@0.6.0", "fla.l2norm@0.6.0", "fla.norm@0.6.0", "fla.gate@0.4.0", "fla.l2norm@0.4.0",
    "fla.norm@0.4.0", "vllm.l2norm@0.19.1", "vllm.norm@0.19.1", "vllm.post-conv@0.33.0", "vllm.norm@0.33.0",
    "sglang.gate@0.5.23", "sglang.l2norm@0.5.23", "fla.core@0.6.0", "vllm.core@0.33.0",
    "vllm.core@0.19.1,gate=emulation.gate",
)  # fmt: skip
FAMILIES = ("core-qwen", "core-wide-gate", "core-quiet", "core-large", "core-exact")


def operation(kernel: str) -> str:
    return kernel.partition(",")[0].partition("@")[0].partition(".")[2]


def jobs(kernels: list[str]) -> list[tuple[str, str, str]]:
    return [(k, family, dtype) for k in kernels for family in FAMILIES for dtype in ("bf16", "fp16")]


def judged(kernel: str, family: str, dtype: str, options: argparse.Namespace) -> dict[str, object]:
    """One diff as plain data; an error is a result too."""
    hk, hv = options.heads
    key_dim = 64 if family == "core-exact" else options.dims
    case = make_core(
        family,
        lengths=[options.tokens, 1, 63],
        k_heads=hk,
        v_heads=hv,
        dims=(key_dim, options.dims),
        dtype=dtype,
    )
    started = time.monotonic()
    try:
        report = diff_ops(operation(kernel), case, kernels=[kernel], device=options.device)
    except GdncheckError as error:
        return {"verdict": "cannot run", "reason": str(error)}
    result = report.results[0]
    return {
        "verdict": result.verdict,
        "reason": result.ruling.reason,
        "ratio": result.ruling.ratio,
        "error": result.ruling.error,
        "ops": [msgspec.to_builtins(f) for f in result.ops],
        "wall_s": time.monotonic() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200-ops.json"))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, nargs=2, default=(16, 32))
    parser.add_argument("--dims", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernel", nargs="*", default=list(KERNELS))
    options = parser.parse_args()
    done = json.loads(options.out.read_text()) if options.out.exists() else {}
    until = time.monotonic() + options.seconds
    for kernel, family, dtype in jobs(options.kernel):
        key = f"{kernel} {family} {dtype} T={options.tokens}"
        if key in done:
            continue
        if time.monotonic() > until:
            print("time is up; run again to go on")
            return
        done[key] = plain_numbers(judged(kernel, family, dtype, options))
        print(f"{key}: {done[key]['verdict']}: {str(done[key]['reason'])[:120]}", flush=True)
        with atomic_path(options.out) as temporary:
            temporary.write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    main()
