"""Why SGLang 0.5.23's chunk kernel loses what earlier tokens wrote: a guard on a sum that is no staircase.

usage: python bench/sglang_guard.py

`safe_exp` (kernels/ops/attention/fla/op.py) takes exp of a difference G_i - G_j, and zero where it is
positive, which it cannot be for j <= i and g <= 0: in exact arithmetic, or where G is summed one after
the other. A GPU sums in parallel (a scan by doubling strides), so tokens whose gate is 0, or smaller
than an ulp of the sum, get sums that differ in the last bit in either direction; some of the pairs are
then zeroed. Here the calls that departed on an H200 are made again in float64 with only that changed.
Results: bench/results/sglang-guard.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent / "h200"))
from gdncheck.reference.truth import truth
from record import save
from sglang_prefix import CHUNK, cases, normalised, whole

Scan = Callable[[Tensor], Tensor]


def one_after_the_other(g: Tensor) -> Tensor:
    return g.cumsum(0)


def by_doubling(g: Tensor) -> Tensor:
    """Inclusive float32 scan in log2(C) steps, the association of a parallel scan."""
    stride = 1
    while stride < len(g):
        g = torch.cat([g[:stride], g[stride:] + g[:-stride]])
        stride *= 2
    return g


def chunks(x: dict[str, Tensor], scan: Scan, guarded: bool) -> tuple[Tensor, int]:
    """(output [T, HV, V] float64, pairs whose difference is positive) of the chunk form, G in float32."""
    output, positive = torch.zeros(x["v"].shape, dtype=torch.float64), 0
    shared = x["v"].shape[1] // x["k"].shape[1]

    def decay(difference: Tensor) -> Tensor:
        guard = torch.where(difference <= 0, difference, -torch.inf) if guarded else difference
        return guard.double().exp()

    for (sequence, (start, stop)), head in product(
        enumerate(pairwise(x["cu_seqlens"].tolist())), range(x["v"].shape[1])
    ):
        state = x["initial_state"][sequence, head].double()
        for a in range(start, stop, CHUNK):
            b = min(a + CHUNK, stop)
            q, k = (x[name][a:b, head // shared].double() for name in ("q", "k"))
            v, beta = x["v"][a:b, head].double(), x["beta"][a:b, head].double()[:, None]
            padded = torch.zeros(CHUNK)
            padded[: b - a] = x["g"][a:b, head]
            total = scan(padded)[: b - a]
            lower = torch.ones(b - a, b - a).double().tril()
            difference = total[:, None] - total
            positive += int(((difference > 0) & lower.bool()).sum())
            pairs = decay(difference).nan_to_num(0.0, 0.0) * lower
            inverse = torch.linalg.inv(torch.eye(b - a).double() + (beta * (k @ k.T) * pairs).tril(-1))
            from_start = total.double().exp()[:, None]
            v_new = inverse @ (beta * v) - (inverse @ (beta * k * from_start)) @ state
            output[a:b, head] = (from_start * (q @ state) + (q @ k.T * pairs) @ v_new) * q.shape[1] ** -0.5
            state = from_start[-1] * state + k.T @ (decay(total[-1] - total)[:, None] * v_new)
    return output, positive


def main() -> None:
    rows = []
    for name, (tensors, raw) in cases(False).items():
        x = normalised(tensors, raw)
        assert bool(torch.isfinite(truth(**x)[0]).all())
        for scan, guarded in product((one_after_the_other, by_doubling), (True, False)):
            output, positive = chunks(x, scan, guarded)
            row = {"case": name, "scan": scan.__name__, "guard": guarded, "positive_pairs": positive}
            rows.append(row | whole(x, output))
            print(rows[-1], flush=True)
    save("sglang-guard", __file__, {"rows": rows})


if __name__ == "__main__":
    main()
