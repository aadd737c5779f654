"""Output bound: an output row cannot exceed scale |q_t| B_t.

Statement. Where the state bound of tier 1 holds up to token t, |o_t| <= scale |q_t| B_t, and rounding adds
at most the running error bound of tier 2.
Fires on: a finite output row above the bound, at the first such token.
Silent on: rows outside the theorem; non-finite rows (`non-finite`).
"""

from __future__ import annotations

import torch

from ..nonfinite import place_of_row
from ..report_words import where
from ..trial import Trial
from ..verdict import Outcome
from .state_bound import SLACK_ROUNDOFFS

NAME, TIER = "output-bound", 1


def check(trial: Trial) -> Outcome:
    """Compare each output row's norm with its bound."""
    bounds = trial.state_bounds
    if not bool(bounds.contracting.any()):
        return Outcome(
            check=NAME, tier=TIER, status="not-applicable", reason="beta |k|^2 exceeds 1 from the start"
        )
    error = trial.error_bounds.output
    norm = torch.linalg.vector_norm(trial.output, dim=-1, dtype=torch.float64)
    limit = bounds.output * (1 + SLACK_ROUNDOFFS * trial.roundoffs.operand) + error
    # Smaller than anything the dtype resolves is no excess.
    limit = limit + float(torch.finfo(trial.output.dtype).tiny)
    above = bounds.contracting & torch.isfinite(norm) & (norm > limit)
    if not bool(above.any()):
        return Outcome(check=NAME, tier=TIER, status="ok")
    row, head = above.nonzero()[0].tolist()
    place = place_of_row(trial.measured["output"].tiles, row, head, "wrong")
    measured, allowed = float(norm[row, head]), float(limit[row, head])
    return Outcome(
        check=NAME,
        tier=TIER,
        status="fires",
        place=place,
        reason=f"output at {where(place)} has norm {measured:.4g}, above the bound {allowed:.4g} on "
        "any output that these inputs can give",
        numbers={"norm": measured, "limit": allowed, "would_pass": {"limit": measured}},
    )
