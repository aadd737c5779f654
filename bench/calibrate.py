"""Calibration: how far sound kernels lie from every limit of a verdict, measured and plotted.

The idea: each limit is a statement about honest kernels, so each is held against their distribution: the
numbered cases of `honest_cases` through the roster of `honest_kernels`, tile by tile, with the yardsticks
that a verdict uses. What stochastic rounding would give instead is measured beside it, as the proof that it
is no stand-in. The tail beyond the largest value seen is extrapolated by an exponential fit to log ratios:
from it come the chance that one tile crosses its limit and the chance per case.

Writes bench/results/calibration.json and docs/img/calibration-*.png (with matplotlib, the extra `plot`).

    python calibrate.py --cases 200
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gdncheck.capture.case import Case
from gdncheck.compare.checks.emulation_ratio import MAX_LIMIT, RMS_LIMIT, ROW_LIMIT, ratios
from gdncheck.compare.checks.state_bound import SLACK_ROUNDOFFS
from gdncheck.compare.inputs import call_of
from gdncheck.compare.soundness import soundness_of
from gdncheck.compare.trial import TENSORS, Measured, Trial
from gdncheck.compare.witness import Witness
from gdncheck.compare.yardstick import Scale
from honest_cases import arguments, case_number
from honest_kernels import Honest, InProcess, roster
from record import save

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "img"
SHARES = (0.5, 0.99, 0.999, 0.9999, 1.0)
# Excesses of log score above this quantile are fitted.
TAIL_FROM = 0.99
# With fewer of them a fit says nothing, and the share above the limit stands alone.
FEWEST_EXCESSES = 30
LABELS = {
    "rms": f"RMS ratio of a tile (limit {RMS_LIMIT} and wider)",
    "peak": f"largest entry (limit {MAX_LIMIT:g} and wider)",
    "row": f"one row (limit {ROW_LIMIT:g})",
    "score": "share of its limit",
    "running": "error over running bound (limit 1)",
    "bound": "norm over state or output bound (limit 1)",
}


@dataclass(frozen=True)
class Key:
    """One distribution."""

    kind: str
    dtype: str
    kernels: str
    """`undeclared`, `declared`, or `stochastic rounding`."""


class Samples:
    """Values by distribution."""

    def __init__(self) -> None:
        self.values: dict[Key, list[torch.Tensor]] = defaultdict(list)
        self.runs: Counter[tuple[str, str]] = Counter()
        """Runs of a kernel on a case, by dtype and kind of kernel."""

    def add(self, key: Key, values: torch.Tensor) -> None:
        flat = values.flatten().double()
        flat = flat[torch.isfinite(flat) & (flat > 0)]
        if flat.numel():
            self.values[key].append(flat)

    def of(self, key: Key) -> torch.Tensor:
        return torch.cat(self.values[key])


def collect(samples: Samples, number: int, seed: int) -> None:
    """All honest kernels of one case, and one of them with stochastic rounding."""
    case = case_number(number, seed)
    family, dtype = arguments(number, seed)["family"], case["v"].dtype
    witness = Witness(case)
    if not soundness_of(witness).sound:
        return
    name = str(dtype).removeprefix("torch.")
    kernels = roster(number, seed, family=family, dtype=dtype)
    for kernel in kernels:
        _add(samples, _trial(witness, case, kernel), name, "declared" if kernel.declares else "undeclared")
    declared = next(k for k in kernels if k.declares)
    random = replace(declared, precision=declared.precision.with_mode("stochastic"), variant=None)
    torch.manual_seed(number)
    _add(samples, _trial(witness, case, random), name, "stochastic rounding")


def _trial(witness: Witness, case: Case, kernel: Honest) -> Trial:
    runner = InProcess(kernel)
    outputs = runner.run([call_of(case)])[0].outputs
    return Trial(witness, runner.info, outputs["output"], outputs["final_state"])


def _add(samples: Samples, trial: Trial, dtype: str, kernels: str) -> None:
    samples.runs[dtype, kernels] += 1
    for tensor in TENSORS:
        measured, scale = trial.measured[tensor], trial.yardstick.of(tensor)
        table = ratios(measured, scale)
        noisy = _noisy(measured, scale)
        samples.add(Key("rms", dtype, kernels), table.rms[noisy])
        samples.add(Key("peak", dtype, kernels), table.peak[noisy])
        samples.add(Key("row", dtype, kernels), table.row)
        samples.add(Key("score", dtype, kernels), table.score[noisy])
    if kernels == "stochastic rounding":
        return
    bounds, errors = trial.witness.state_bounds, trial.witness.error_bounds(trial.roundoffs)
    slack = 1 + SLACK_ROUNDOFFS * trial.roundoffs.operand
    for tensor, holds, size, error in (
        ("output", bounds.contracting, bounds.output, errors.output),
        ("state", bounds.final_contracting, bounds.final, errors.final),
    ):
        measured = trial.measured[tensor]
        informative = holds & (error < measured.rows.truth_square.sqrt())
        samples.add(Key("running", dtype, kernels), (measured.rows.square.sqrt() / error)[informative])
        norm = torch.linalg.vector_norm(measured.got.flatten(2), dim=-1, dtype=torch.float64)
        samples.add(Key("bound", dtype, kernels), (norm / (size * slack + error))[holds])


def _noisy(measured: Measured, scale: Scale) -> torch.Tensor:
    """[P, H]: pools in which the emulation rounds at all."""
    return scale.rms > 0


def describe(values: torch.Tensor) -> dict[str, Any]:
    """Quantiles, and for what has a limit the tail beyond it."""
    # torch.quantile takes at most 2^24 values; the tail is exact by sorting.
    ordered = values.sort().values
    found: dict[str, Any] = {"n": len(ordered)}
    for share in SHARES:
        found[f"p{100 * share:g}"] = float(f"{float(ordered[math.ceil(share * len(ordered)) - 1]):.4g}")
    return found


def tail(values: torch.Tensor, per_case: float) -> dict[str, float]:
    """Chance that a score passes 1, from an exponential fit to log scores above TAIL_FROM.

    per_case: scores of one kernel on one case; the chance per case is so many times the chance per tile.
    """
    ordered = values.sort().values
    start = float(ordered[int(TAIL_FROM * len(ordered))])
    above = ordered[ordered > start]
    if start >= 1 or len(above) < FEWEST_EXCESSES:
        chance = float((ordered > 1).double().mean())
    else:
        mean = float((above / start).log().mean())
        chance = len(above) / len(ordered) * math.exp(math.log(start) / mean)
    return {"per_tile": float(f"{chance:.2g}"), "per_case": float(f"{min(1.0, chance * per_case):.2g}")}


def report(samples: Samples) -> dict[str, Any]:
    """Every distribution; for scores the chance of crossing the limit, per tile and per kernel and case."""
    table: dict[str, Any] = {}
    for key in sorted(samples.values, key=lambda k: (k.kind, k.dtype, k.kernels)):
        values = samples.of(key)
        entry = describe(values)
        if key.kind == "score":
            entry["chance_above_limit"] = tail(values, len(values) / samples.runs[key.dtype, key.kernels])
        table.setdefault(key.kind, {}).setdefault(key.dtype, {})[key.kernels] = entry
    return table


def plot(samples: Samples) -> list[str]:
    """One picture per kind: the share of values above each size, by dtype and kind of kernel."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    limits = {
        "rms": RMS_LIMIT,
        "peak": MAX_LIMIT,
        "row": ROW_LIMIT,
        "score": 1.0,
        "running": 1.0,
        "bound": 1.0,
    }
    styles = {"undeclared": "-", "declared": "--", "stochastic rounding": ":"}
    colours = {"bfloat16": "tab:blue", "float16": "tab:orange", "float32": "tab:green"}
    IMAGES.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, limit in limits.items():
        figure, axes = plt.subplots(figsize=(6.4, 3.6), dpi=72)
        for key in sorted(samples.values, key=lambda k: (k.dtype, k.kernels)):
            if key.kind != kind:
                continue
            ordered = samples.of(key).sort(descending=True).values
            rank = torch.logspace(0, math.log10(len(ordered)), 200).long().clamp(1, len(ordered))
            above = rank.double() / len(ordered)
            axes.plot(
                ordered[rank - 1], above, styles[key.kernels], color=colours[key.dtype],
                label=f"{key.dtype}, {key.kernels}", linewidth=1.2,
            )  # fmt: skip
        axes.axvline(limit, color="black", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel=LABELS[kind], ylabel="share above")
        axes.set_xlim(left=max(axes.get_xlim()[0], limit * 1e-3))
        axes.legend(fontsize=6, loc="lower left")
        figure.tight_layout()
        path = IMAGES / f"calibration-{kind}.png"
        figure.savefig(path, metadata={"Software": None})
        plt.close(figure)
        written.append(path.name)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    samples = Samples()
    for number in range(chosen.start, chosen.start + chosen.cases):
        collect(samples, number, chosen.seed)
    table = report(samples)
    save("calibration", __file__, {"cases": chosen.cases, "seed": chosen.seed, "distributions": table})
    print(f"drew {', '.join(plot(samples))}")
    print(json.dumps(table["score"], indent=1))


if __name__ == "__main__":
    main()
