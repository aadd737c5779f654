"""Non-finite values: where the stored truth is finite, so is a sound kernel's answer.

Statement. With finite inputs inside the domain, NaN, +Inf and -Inf may appear only where the truth, cast
to the dtype that the kernel stores, is not finite either. Where beta |k|^2 <= 1 + slack and the bound B_t
of tier 1 is below the dtype's maximum this is a theorem; elsewhere it holds unless an honest emulation
of the same precision is not finite in the same rows (near-parallel keys with beta above 1 can do that).
Fires on: a NaN or infinity that nothing in the mathematics explains.
Silent on: overflow that the truth shares. Suspects what an honest kernel shares outside the theorem.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..nonfinite import first_place
from ..report_words import where
from ..trial import TENSORS, Measured, Trial
from ..verdict import Outcome

NAME, TIER = "non-finite", 1


def check(trial: Trial) -> Outcome:
    """Output first: it has the token; then the state."""
    for name in TENSORS:
        measured = trial.measured.get(name)
        if measured is not None and measured.masks.n_unexplained:
            return _outcome(trial, name, measured)
    return Outcome(check=NAME, tier=TIER, status="ok")


def _outcome(trial: Trial, name: str, measured: Measured) -> Outcome:
    masks = measured.masks
    place = first_place(masks, measured.tiles)
    assert place is not None
    counts = {k: v for k, v in masks.by_class.items() if v}
    many = ", ".join(f"{v} {k}" for k, v in counts.items())
    bad = masks.unexplained > 0
    theorem, bound = _theorem(trial, name, measured.got.dtype, bad)
    numbers = {**counts, "bound": bound, "limit": float(torch.finfo(measured.got.dtype).max)}
    if theorem:
        reason = (
            f"{many} in {name} at {where(place)}: the truth is finite and cannot exceed {bound:.3g} there "
            "(exp(g) <= 1, beta |k|^2 <= 1)"
        )
        return Outcome(check=NAME, tier=TIER, status="fires", reason=reason, place=place, numbers=numbers)
    honest = trial.yardstick.of(name).blown if trial.witness.inputs.g.ndim == 2 else torch.zeros_like(bad)
    if bool((bad & ~honest).any()):
        reason = f"{many} in {name} at {where(place)}, where the truth is finite"
        return Outcome(check=NAME, tier=TIER, status="fires", reason=reason, place=place, numbers=numbers)
    reason = (
        f"{many} in {name} at {where(place)}: the truth is finite, but an honest emulation in this precision "
        "overflows there too (beta |k|^2 above 1)"
    )
    return Outcome(check=NAME, tier=TIER, status="suspect", reason=reason, place=place, numbers=numbers)


def _theorem(trial: Trial, name: str, dtype: torch.dtype, bad: Tensor) -> tuple[bool, float]:
    """Whether some bad row lies where the finite-state theorem holds, and the bound there."""
    bounds = trial.state_bounds
    size = bounds.output if name == "output" else bounds.final
    holds = bounds.contracting if name == "output" else bounds.final_contracting
    proven = bad & holds & (size * (1 + 2.0**-4) < float(torch.finfo(dtype).max))
    # An fp16 kernel's intermediates (u, w) are as large as |v| + |k| |S|, which its range must hold as well.
    if trial.witness.inputs.v.dtype == torch.float16:
        proven &= 4 * (bounds.state.amax() if bounds.state.numel() else 0.0) < float(
            torch.finfo(torch.float16).max
        )
    if not bool(proven.any()):
        return False, float(size[bad].max())
    return True, float(size[proven].max())
