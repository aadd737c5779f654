"""State bound: inside the domain a state cannot exceed what was put into it.

Statement. With finite inputs, exp(g) <= 1 and 0 <= beta |k|^2 <= 1 + slack, |S_T|_F <= B_T where
B_t = exp(g_t) B_{t-1} + beta_t |k_t| |v_t|, B_0 = |S_0|_F (numerics.md, tier 1); rounding adds at most the
running error bound of tier 2.
Fires on: a finite final state of a head whose norm is above the bound.
Silent on: growth that the bound allows; heads outside the theorem; non-finite states (`non-finite`).
"""

from __future__ import annotations

import torch

from ..report_words import where
from ..trial import Trial
from ..verdict import Outcome, Place

NAME, TIER = "state-bound", 1
# The kernel's keys are rounded: a step may stretch by this factor of the operand round-off.
SLACK_ROUNDOFFS = 8.0


def check(trial: Trial) -> Outcome:
    """Compare each head's final state norm with its bound."""
    if trial.state is None:
        return Outcome(check=NAME, tier=TIER, status="not-applicable", reason="no final state")
    bounds = trial.state_bounds
    error = trial.error_bounds.final
    norm = torch.linalg.vector_norm(trial.state.flatten(2), dim=-1, dtype=torch.float64)
    limit = bounds.final * (1 + SLACK_ROUNDOFFS * trial.roundoffs.operand) + error
    above = bounds.final_contracting & torch.isfinite(norm) & (norm > limit)
    if not bool(bounds.final_contracting.any()):
        return Outcome(
            check=NAME, tier=TIER, status="not-applicable", reason="beta |k|^2 exceeds 1 in every head"
        )
    if not bool(above.any()):
        return Outcome(check=NAME, tier=TIER, status="ok")
    sequence, head = above.nonzero()[0].tolist()
    place = Place(tensor="state", class_="wrong", sequence=sequence, head=head)
    measured, allowed = float(norm[sequence, head]), float(limit[sequence, head])
    return Outcome(
        check=NAME,
        tier=TIER,
        status="fires",
        place=place,
        reason=f"final state at {where(place)} has norm {measured:.4g}, above the bound {allowed:.4g} "
        "on any state that these inputs can give",
        numbers={"norm": measured, "limit": allowed, "would_pass": {"limit": measured}},
    )
