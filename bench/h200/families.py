"""Every synthetic family through real kernels on one GPU: verdict counts, and each departure in full.

One pool serves all cases; head counts and dims stay the same so that each kernel tunes once per dtype.
usage: python bench/h200/families.py KERNEL... ; results: bench/results/h200-families.json
"""

from __future__ import annotations

import collections
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import save  # noqa: I001

from gdncheck.capture.errors import GdncheckError
from gdncheck.capture.make import FAMILIES, make
from gdncheck.compare.diff import diff_case
from gdncheck.compare.jsonout import place
from gdncheck.compare.session import Settings
from gdncheck.kernels.pool import WorkerPool

LENGTHS = ((300,), (1, 2, 3, 200), (64, 65, 63, 130))
DTYPES = ("bf16", "fp16", "fp32")
BUDGET_SECONDS = 240


def rows(kernels: list[str]):
    """One row per (family, lengths, dtype, kernel) until the budget is spent."""
    started = time.monotonic()
    with WorkerPool(device="cuda", time_limit=120) as pool:
        handles = [pool.begin(name) for name in kernels]
        for dtype in DTYPES:
            for family in FAMILIES:
                for seed, lengths in enumerate(LENGTHS):
                    if time.monotonic() - started > BUDGET_SECONDS:
                        return
                    name = {"family": family, "lengths": lengths, "dtype": dtype, "seed": seed}
                    try:
                        case = make(
                            family, lengths=lengths, k_heads=4, v_heads=4, dims=(64, 64), dtype=dtype,
                            state="random", seed=seed,
                        )  # fmt: skip
                    except GdncheckError as error:
                        yield {**name, "kernel": None, "verdict": "not made", "reason": str(error)}
                        continue
                    _, results = diff_case(
                        case, handles, Settings(), asked=True, device="cuda", say=lambda text: None
                    )
                    for r in results:
                        yield {
                            **name, "kernel": r.kernel, "verdict": r.verdict, "tier": r.ruling.tier,
                            "reason": r.ruling.reason, "place": place(r.ruling.worst_tile),
                        }  # fmt: skip


def main() -> None:
    found = list(rows(sys.argv[1:]))
    counts = collections.Counter((str(r["kernel"]), r["dtype"], r["verdict"]) for r in found)
    for key, number in sorted(counts.items()):
        print(*key, number)
    for r in found:
        if r["verdict"] in ("fail", "suspect", "error", "timeout"):
            print(r["kernel"], r["family"], r["dtype"], r["lengths"], r["verdict"], r["reason"][:260])
    save("h200-families", __file__, {"rows": found})


if __name__ == "__main__":
    main()
