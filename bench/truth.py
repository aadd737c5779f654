"""The truth's price: recurrence loop, chunk form and truth on one large case, in one run.

T = 11,686 tokens, 32 value heads over 16 key heads, 128 x 128: the size of a captured prompt of
Qwen3.5-35B-A3B. Rounds interleave the three, and ratios are medians of ratios within a round, so that a
machine that others use too disturbs all three alike. Target: the truth under 8 s on 2 CPU cores, and
4 times as fast as the loop. On a GPU the same on that device.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from typing import Any

import torch
from gdncheck.reference.chunk import chunk_form
from gdncheck.reference.recurrence import recurrence
from gdncheck.reference.truth import truth
from record import save, spread, timed


def prompt(tokens: int, device: str) -> dict[str, torch.Tensor]:
    """Unit keys, Gaussian q and v, decay and strength as a trained layer has them; float32."""
    make = torch.Generator().manual_seed(0)
    q, k = (torch.randn(tokens, 16, 128, generator=make) for _ in range(2))
    case = {
        "q": q / q.norm(dim=-1, keepdim=True),
        "k": k / k.norm(dim=-1, keepdim=True),
        "v": torch.randn(tokens, 32, 128, generator=make),
        "g": 0.1 * (1 - torch.rand(tokens, 32, generator=make)).log(),
        "beta": torch.rand(tokens, 32, generator=make),
    }
    return {name: tensor.to(device) for name, tensor in case.items()}


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tokens", type=int, default=11_686)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = arguments.parse_args()
    case = prompt(chosen.tokens, chosen.device)
    forms = {"recurrence": recurrence, "chunk_form": chunk_form, "truth": truth}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    results: dict[str, Any] = {}

    def run(name: str) -> None:
        results[name] = forms[name](**case)

    for number in range(chosen.rounds):
        for name in forms:
            # One uncounted run for a GPU's first launches; a CPU needs none.
            warmup = 1 if number == 0 and chosen.device != "cpu" else 0
            seconds[name] += timed(functools.partial(run, name), 1, warmup=warmup)
    loops = zip(seconds["recurrence"], seconds["truth"], strict=True)
    speedup = statistics.median(loop / fast for loop, fast in loops)
    expected, got = results["recurrence"], results["truth"]
    error = {"output": relative(got[0], expected[0]), "final_state": relative(got[1], expected[1])}
    measured = {
        "tokens": chosen.tokens,
        "device": chosen.device,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "recurrence_over_truth": speedup,
        "relative_error": error,
    }
    save(f"truth-{chosen.device}", __file__, measured)
    for name, values in seconds.items():
        print(f"{name}: median {statistics.median(values):.3f} s")
    print(f"truth is {speedup:.1f} times as fast as the loop; relative error {error['output']:.1e}")


if __name__ == "__main__":
    main()
