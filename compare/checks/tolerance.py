"""Tolerance: |got - truth| <= atol + rtol |truth|, for callers who insist on one.

Statement. None: a tolerance is a choice, not a fact, so a verdict reached by it is marked as such. It stands
in for tiers 2 and 3, for the tensors that it names; non-finite values, exact cases and relations are judged
as ever.
Fires on: an entry beyond the tolerance.
Silent on: everything within it, and tensors without one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..nonfinite import place_of_row
from ..report_words import number, where
from ..tiles import BLOCK_ENTRIES
from ..tolerances import Tolerance, words
from ..trial import Measured, Trial
from ..verdict import Outcome

NAME, TIER = "tolerance", 3
MARK = "a tolerance of the caller's, not a rule"


def check(trial: Trial, tolerances: Mapping[str, Tolerance]) -> Outcome:
    """Compare entry by entry, output first."""
    needed: dict[str, float] = {}
    for name, tolerance in tolerances.items():
        measured = trial.measured.get(name)
        if measured is None:
            continue
        excess = _excess(measured, tolerance.rtol)
        largest = float(excess.max()) if excess.numel() else 0.0
        if largest > tolerance.atol:
            row, head = divmod(int(excess.argmax()), excess.shape[1])
            place = place_of_row(measured.tiles, row, head, "wrong")
            return Outcome(
                check=NAME,
                tier=TIER,
                status="fires",
                place=place,
                reason=f"{name} at {where(place)} misses {words(tolerance)}: it needs atol "
                f"{number(largest)} ({MARK})",
                numbers={"would_pass": {"atol": largest, "rtol": tolerance.rtol}},
            )
        needed[f"{name}_atol"] = max(largest, 0.0)
    within = "; ".join(f"every entry of {name} is within {words(t)}" for name, t in tolerances.items())
    return Outcome(
        check=NAME, tier=TIER, status="ok", reason=f"{within} ({MARK})", numbers={"needed": needed}
    )


def _excess(measured: Measured, rtol: float) -> torch.Tensor:
    """[R, H] largest |error| - rtol |truth| of a row; entries that are not finite are left out."""
    rows, heads = measured.got.shape[:2]
    got, want = measured.got.flatten(2), measured.want.flatten(2)
    result = torch.zeros(rows, heads, dtype=torch.float64, device=want.device)
    block = max(1, BLOCK_ENTRIES // max(1, heads * got.shape[2]))
    for start in range(0, rows if got.shape[2] else 0, block):
        part = slice(start, start + block)
        error = (got[part].double() - want[part]).abs() - rtol * want[part].abs()
        result[part] = torch.where(torch.isfinite(error), error, 0.0).amax(-1)
    return result
