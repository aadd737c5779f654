"""Low bits: a state declared float32 has all of float32's bits.

Statement. A final state returned in float32 was rounded to a narrower format on its way if the low bits
that the format lacks (16 for bfloat16, 13 for float16 and tf32) are zero in every entry of a head, although
they are not in the truth nor in the emulation. The emulation ratio hides this (median 1.17, numerics.md).
Fires on: such a head, unless a rounding clause declares the state's format.
Silent on: states that are exact in the narrower format (integers, one-hot keys), empty sequences, a state
that came in that narrow and was not touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..report_words import where
from ..trial import Trial
from ..verdict import Outcome, Place

NAME, TIER = "low-bits", 3
FORMATS = (("bfloat16", 16), ("float16 or tf32", 13))
# Non-zero entries that a head needs before their pattern says anything.
ENOUGH = 64


def check(trial: Trial) -> Outcome:
    """Look at the bit patterns of each (sequence, head)."""
    reason = _not_applicable(trial)
    if reason:
        return Outcome(check=NAME, tier=TIER, status="not-applicable", reason=reason)
    assert trial.state is not None
    truth = trial.truth[1].float()
    honest = trial.yardstick.plain_state if trial.witness.inputs.g.ndim == 2 else truth
    for name, bits in FORMATS:
        rounded = low_bits_zero(trial.state, bits)
        rounded &= ~low_bits_zero(truth, bits, enough=0) & ~low_bits_zero(honest, bits, enough=0)
        if bool(rounded.any()):
            sequence, head = rounded.nonzero()[0].tolist()
            place = Place(tensor="state", class_="wrong", sequence=sequence, head=head)
            many = int(rounded.sum())
            return Outcome(
                check=NAME,
                tier=TIER,
                status="fires",
                place=place,
                reason=f"final state at {where(place)} was rounded to {name}: its low {bits} bits are zero "
                f"in every entry, the truth's are not ({many} of {rounded.numel()} heads)",
                numbers={"bits": bits, "heads": many},
            )
    return Outcome(check=NAME, tier=TIER, status="ok")


def _not_applicable(trial: Trial) -> str:
    if trial.state is None:
        return "no final state"
    if trial.state.dtype != torch.float32:
        return f"the state came back in {trial.state.dtype}"
    for clause in ("cast.final_state", "cast.state"):
        if trial.info.contract.value(clause, "fp32") not in ("fp32", "float32", "fp64"):
            return f"{clause} is declared"
    return ""


def low_bits_zero(state: Tensor, bits: int, *, enough: int = ENOUGH) -> Tensor:
    """[N, H] bool: every finite entry's low bits are zero, and at least `enough` of them are not zero.

    The low bits of NaN and Inf are zero in any format and say nothing.
    """
    flat = state.float().contiguous().flatten(2)
    patterns = flat.view(torch.int32)
    finite = torch.isfinite(flat)
    clean = ((patterns & ((1 << bits) - 1) == 0) | ~finite).all(-1)
    return clean & ((finite & (flat != 0)).sum(-1) >= enough)
