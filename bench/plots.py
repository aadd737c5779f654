"""Draw what was measured: docs/img/performance-growth.png and -truth.png, from bench/results/h200-speed.json.

usage: python bench/plots.py    (needs the extra `plot`)
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

HERE = Path(__file__).resolve().parent
IMAGES = HERE.parent / "docs" / "img"


def growth(parts: dict[str, Any]) -> None:
    """Truth over tokens and over heads, both axes logarithmic, beside a line of slope 1."""
    found = parts["growth"]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4))
    for axis, key, word in (
        (axes[0], "seconds_by_tokens", "tokens (32 value heads)"),
        (axes[1], "seconds_by_heads", f"value heads ({found.get('tokens_of_heads', 11_686):,} tokens)"),
    ):
        sizes = [int(n) for n in found[key]]
        seconds = list(found[key].values())
        axis.loglog(sizes, seconds, "o-", base=2, label="truth, float64")
        axis.loglog(sizes, [seconds[-1] * n / sizes[-1] for n in sizes], ":", base=2, label="linear")
        axis.set_xlabel(word)
        axis.set_ylabel("seconds")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(IMAGES / "performance-growth.png", dpi=110)


def bars(parts: dict[str, Any]) -> None:
    """Medians at the real layer's size on one logarithmic axis, fastest first."""
    medians = {name: s["median"] for name, s in parts["truth"]["seconds"].items()}
    medians |= {f"fla {v} kernel": s["min"] for v, s in parts.get("kernels", {}).items()}
    medians |= {
        f"emulation {name}": s["median"]
        for name, s in parts["emulation"]["seconds"].items()
        if name not in medians
    }
    ordered = sorted(medians, key=lambda name: medians[name], reverse=True)
    figure, axis = pyplot.subplots(figsize=(9, 0.4 * len(ordered) + 1.2))
    axis.barh(ordered, [medians[name] for name in ordered])
    axis.set_xscale("log")
    axis.set_xlabel("seconds (T = 11,686, 32 heads, 128 x 128, H200)")
    for row, name in enumerate(ordered):
        axis.text(medians[name], row, f" {medians[name] * 1e3:.3g} ms", va="center")
    axis.set_xlim(10 ** math.floor(math.log10(min(medians.values()))), 6 * max(medians.values()))
    figure.tight_layout()
    figure.savefig(IMAGES / "performance-truth.png", dpi=110)


def main() -> int:
    path = HERE / "results" / "h200-speed.json"
    if not path.exists():
        print(f"plots: no bench/results/{path.name}; run bench/h200/speed.py on a GPU first")
        return 3
    parts = json.loads(path.read_text())["parts"]
    IMAGES.mkdir(parents=True, exist_ok=True)
    growth(parts)
    bars(parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
