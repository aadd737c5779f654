"""Exact: on a case whose every intermediate is a small integer there is nothing to round.

Statement. With g = 0 (or a total reset), beta in {0, 1}, one-hot keys, small-integer v and S_0 and a power
of two as scale, every value of the chunk algorithm is exact in bf16, tf32 and fp32 (numerics.md, tier 0;
`reference.exact` asserts it), so kernel and truth agree bit for bit.
Fires on: any other bit where the contract promises exactness (`relation.exact`); otherwise on a value wrong
by half a unit or more, which no rounding explains: the wrong integer names the token that was read.
Silent on: cases that are not exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.contract import Promise
from ...reference.exact_decode import decode_exact
from ..nonfinite import place_of_row
from ..trial import TENSORS, Measured, Trial
from ..verdict import Outcome

NAME, TIER = "exact", 0


def check(trial: Trial) -> Outcome:
    """Judge the case itself, where it is exact."""
    if trial.clauses or not trial.witness.is_exact:
        return Outcome(check=NAME, tier=TIER, status="not-applicable", reason="the case is not exact")
    return compare_exactly(trial, NAME, trial.info.contract.relation("exact"))


def compare_exactly(trial: Trial, name: str, promise: Promise) -> Outcome:
    """Compare both tensors with an exact truth; the first wrong row in packed order decides."""
    units = {"output": abs(trial.witness.inputs.scale), "state": 1.0}
    inexact = 0
    for tensor in TENSORS:
        measured = trial.measured.get(tensor)
        if measured is None:
            continue
        got = measured.got.double()
        # l2norm's eps leaves 1e-15 in the float64 truth; the exact value is what a dtype stores of it.
        want = measured.want.to(measured.got.dtype).double()
        differs = got != want
        # NaN is no integer.
        wrong = ~((got - want).abs() < units[tensor] / 2)
        decisive = differs if promise == "promised" else wrong
        if bool(decisive.any()):
            return _fires(trial, name, measured, want, decisive)
        inexact += int(differs.sum())
    if inexact:
        reason = f"{inexact} entries are off by less than half a unit (exactness is {promise})"
        return Outcome(check=name, tier=TIER, status="not-applicable", reason=reason)
    return Outcome(check=name, tier=TIER, status="ok", reason="every bit agrees with the truth")


def _fires(trial: Trial, name: str, measured: Measured, want: Tensor, wrong: Tensor) -> Outcome:
    rows = wrong.flatten(2).any(-1)
    row, head = rows.nonzero()[0].tolist()
    place = place_of_row(measured.tiles, row, head, "wrong")
    # Only what is decisively wrong is read: the rest is taken as right.
    inputs, got = trial.witness.inputs, torch.where(wrong, measured.got.double(), want)
    reading = decode_exact(
        got,
        want,
        v=inputs.v,
        cu_seqlens=inputs.cu_seqlens,
        scale=inputs.scale,
        initial_state=inputs.initial_state,
    )
    assert reading is not None
    prefix = "" if name == NAME else "on an exact case of the same shape, "
    return Outcome(
        check=name,
        tier=TIER,
        status="fires",
        place=place,
        reason=f"{prefix}{measured.tiles.tensor} is {reading.got:g} and must be exactly {reading.want:g} "
        f"{reading.text} ({int(rows.sum())} of {rows.numel()} rows are wrong)",
        numbers={
            "got": reading.got,
            "want": reading.want,
            "wrong_rows": int(rows.sum()),
            "would_pass": {"atol": float((got - want).abs().nan_to_num(torch.inf).max())},
        },
    )
