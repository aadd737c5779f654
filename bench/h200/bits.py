"""How much of a kernel's answer its emulation has, bit for bit: is its rounding read rightly?

usage: python bench/h200/bits.py [--kernel NAME]... [--profile NAME]... [--device cpu]

For each kernel and precision profile (its own, and those asked for), on a few cases: the share of output
entries with the emulation's very bits, and the kernel's error against the truth over the emulation's, output
and state. A profile that has the kernel's casts has 0.9 and more of the bits and ratios of 1; what is left is
the order of sums. Results: bench/results/h200-bits.json, written as the run goes on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import save  # noqa: I001

from gdncheck.capture.make import make
from gdncheck.compare.inputs import call_of, inputs_of
from gdncheck.kernels.pool import WorkerPool
from gdncheck.reference.emulation import emulate_chunk
from gdncheck.reference.truth import truth

KERNELS = (
    "flashinfer.chunk@0.6.6", "sglang.chunk@0.5.23", "vllm.chunk@0.19.1", "vllm.chunk@0.33.0",
    "fla.chunk@0.4.0", "fla.chunk@0.6.0",
)  # fmt: skip
CASES = (("qwen", [64]), ("qwen", [200]), ("long-memory", [7, 130]), ("gaussian", [256]), ("no-decay", [90]))


def compared(kernel: Any, profiles: list[str], device: str) -> list[dict[str, Any]]:
    """One row per case and profile."""
    rows = []
    for number, (family, lengths) in enumerate(CASES):
        case = make(
            family, lengths=lengths, k_heads=2, v_heads=4, dims=(128, 128), state="random", seed=number
        )
        result = kernel.run([call_of(case)])[0]
        if result.status != "ok":
            rows.append({"case": f"{family} {lengths}", "status": result.status, "message": result.message})
            continue
        x = inputs_of(case, device)
        output, state = (result.outputs[name].to(device) for name in ("output", "final_state"))
        true_output, true_state = truth(**x.keywords())
        for profile in profiles:
            again = emulate_chunk(
                x.q, x.k, x.v, x.g, x.beta, precision=profile, scale=x.scale, initial_state=x.initial_state,
                cu_seqlens=x.cu_seqlens, l2norm=x.l2norm,
            )  # fmt: skip
            rows.append({
                "case": f"{family} {lengths}", "profile": profile,
                "equal_output_bits": float((again.output.to(output.dtype) == output).double().mean()),
                "output_ratio": _rms(output, true_output) / _rms(again.output, true_output),
                "state_ratio": _rms(state, true_state) / _rms(again.final_state, true_state),
            })  # fmt: skip
    return rows


def _rms(x: torch.Tensor, true: torch.Tensor) -> float:
    return float((x.double() - true).square().mean().sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernel", action="append")
    parser.add_argument("--profile", action="append", default=[])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--name", default="h200-bits")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with WorkerPool(device=options.device, time_limit=150) as pool:
        for name in options.kernel or KERNELS:
            try:
                kernel = pool.open(name, environment={"GDNCHECK_TUNE": "never"})
                own = kernel.info.capabilities.profile or "generic"
                found[name] = compared(kernel, [own, *options.profile], options.device)
            except Exception as error:  # one kernel that cannot run must not end the others
                found[name] = [{"status": "cannot run", "message": str(error)}]
            save(options.name, __file__, {"kernels": found})
            for row in found[name]:
                print(name, row, flush=True)


if __name__ == "__main__":
    main()
