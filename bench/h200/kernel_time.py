"""One FLA version's chunk kernel by CUDA events, in a process of its own: prints seconds per call as JSON.

usage: python bench/h200/kernel_time.py FOLDER [--tokens 11686]    (FOLDER holds the package `fla`)

Twenty calls between two events, three such rounds uncounted, so that the host's part of a launch hides behind
the GPU's work; heads are expanded beforehand, as the older version wants it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--tokens", type=int, default=11_686)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
    sys.path.insert(0, options.folder)
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    T, H, D = options.tokens, 32, 128
    make = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=make)

    q, k = (torch.nn.functional.normalize(normal(1, T, H, D), dim=-1).bfloat16() for _ in range(2))
    call = {
        "q": q, "k": k, "v": normal(1, T, H, D).bfloat16(), "g": -0.1 * normal(1, T, H).abs(),
        "beta": torch.rand(1, T, H, device="cuda", generator=make), "scale": D**-0.5,
        "initial_state": 0.1 * normal(1, H, D, D), "output_final_state": True,
    }  # fmt: skip
    seconds = []
    for number in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(options.repeats):
            # A tensor of its own: the package keeps chunk indices under the identity of cu_seqlens.
            chunk_gated_delta_rule(**call, cu_seqlens=torch.tensor([0, T], device="cuda"))
        end.record()
        end.synchronize()
        if number >= 3:
            seconds.append(start.elapsed_time(end) / 1e3 / options.repeats)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
