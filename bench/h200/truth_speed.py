"""Kernel, chunk form, truth and recurrence on one GPU at the real layer's size, in one run.

T = 11,686 tokens, 16 key and 32 value heads, 128 x 128, bf16, with an initial state. Results:
bench/results/h200-truth.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gdncheck.capture.case import starting_state
from gdncheck.capture.make import make
from gdncheck.reference.chunk import chunk_form
from gdncheck.reference.recurrence import recurrence
from gdncheck.reference.truth import truth
from record import save, spread, timed

TOKENS = 11_686


def main() -> None:
    case = make(
        "qwen", lengths=(TOKENS,), k_heads=16, v_heads=32, dims=(128, 128), dtype="bf16", state="random"
    )
    inputs = [case[name].cuda() for name in ("q", "k", "v", "g", "beta")]
    keywords = {
        "scale": case.scale,
        "initial_state": starting_state(case).cuda(),
        "cu_seqlens": case["cu_seqlens"].cuda(),
    }
    seconds = {
        "recurrence": spread(timed(lambda: recurrence(*inputs, **keywords), 3)),
        "chunk_form": spread(timed(lambda: chunk_form(*inputs, **keywords), 10)),
        "truth": spread(timed(lambda: truth(*inputs, **keywords), 10)),
    }
    slow, _ = recurrence(*inputs, **keywords)
    fast, _ = truth(*inputs, **keywords)
    agreement = float((slow - fast).norm() / slow.norm())
    save("h200-truth", __file__, {"tokens": TOKENS, "seconds": seconds, "relative_difference": agreement})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        truth(*inputs, **keywords)
        torch.cuda.synchronize()
    print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=60))
    for name, numbers in seconds.items():
        print(f"{name}: median {numbers['median'] * 1e3:.2f} ms")
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"truth against recurrence: {agreement:.2e} relative; peak memory {peak:.1f} GiB")


if __name__ == "__main__":
    main()
