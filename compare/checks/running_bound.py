"""Running error bound: rounding alone cannot take a kernel further from the truth than this.

Statement. |S_computed - S|_F <= e_T with e_t = exp(g_t) e_{t-1} + d_t, d_t the roundings of one step as
the contract declares them (`reference.bounds.error_bounds`; numerics.md, tier 2), and an output row errs by
no more than its bound, both where beta |k|^2 <= 1 + slack.
Fires on: an error above a bound that is itself below the size of what it bounds.
Silent on: bounds above the truth's own norm: such a row is `not informative` and is left to tier 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..nonfinite import place_of_row
from ..report_words import where
from ..trial import TENSORS, Trial
from ..verdict import Outcome

NAME, TIER = "running-bound", 2


def check(trial: Trial) -> Outcome:
    """Compare the norms of the errors with their bounds, output rows first."""
    bounds = trial.error_bounds
    domain = trial.state_bounds
    limits = {
        "output": (bounds.output, domain.contracting),
        "state": (bounds.final, domain.final_contracting),
    }
    informative_rows = 0
    largest = 0.0
    for name in TENSORS:
        measured = trial.measured.get(name)
        if measured is None:
            continue
        limit, holds = limits[name]
        size, error = measured.rows.truth_square.sqrt(), measured.rows.square.sqrt()
        informative = holds & (limit < size) & (measured.masks.anywhere == 0)
        informative_rows += int(informative.sum())
        ratio = torch.where(informative, error / limit, 0.0)
        if bool((ratio > 1).any()):
            return _fires(trial, name, ratio, error, limit)
        largest = max(largest, float(ratio.max()) if ratio.numel() else 0.0)
    if informative_rows == 0:
        reason = "not informative: the bound exceeds the truth everywhere"
        return Outcome(check=NAME, tier=TIER, status="not-applicable", reason=reason)
    return Outcome(
        check=NAME,
        tier=TIER,
        status="ok",
        numbers={"error_over_bound": largest, "informative": informative_rows},
    )


def _fires(trial: Trial, name: str, ratio: Tensor, error: Tensor, limit: Tensor) -> Outcome:
    row, head = divmod(int(ratio.argmax()), ratio.shape[1])
    place = place_of_row(trial.measured[name].tiles, row, head, "wrong")
    measured, allowed = float(error[row, head]), float(limit[row, head])
    return Outcome(
        check=NAME,
        tier=TIER,
        status="fires",
        place=place,
        reason=f"{name} errs by {measured:.3g} at {where(place)}, {measured / allowed:.3g} times what "
        "rounding can add there (running error bound)",
        numbers={
            "error": measured,
            "limit": allowed,
            "ratio": measured / allowed,
            "would_pass": {"limit": measured},
        },
    )
