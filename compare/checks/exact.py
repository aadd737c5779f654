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
from ..inputs import Inputs
from ..nonfinite import place_of_row
from ..report_words import where
from ..tiles import TileMap
from ..trial import TENSORS, Trial
from ..verdict import Outcome
from .exact_words import reading_of

NAME, TIER = "exact", 0


def check(trial: Trial) -> Outcome:
    """Judge the case itself, where it is exact."""
    if trial.clauses or not trial.witness.is_exact:
        return Outcome(check=NAME, tier=TIER, status="not-applicable", reason="the case is not exact")
    return compare_exactly(trial, NAME, trial.info.contract.relation("exact"))


def compare_exactly(trial: Trial, name: str, promise: Promise) -> Outcome:
    """Compare both tensors with an exact truth; the first wrong row in packed order decides."""
    inputs = trial.witness.inputs
    units = {"output": abs(inputs.scale), "state": 1.0}
    inexact = 0
    for tensor in TENSORS:
        measured = trial.measured.get(tensor)
        if measured is None:
            continue
        differs = measured.got.double() != measured.want
        wrong = (measured.got.double() - measured.want).abs() >= units[tensor] / 2
        # NaN is no integer.
        wrong |= ~torch.isfinite(measured.got)
        decisive = differs if promise == "promised" else wrong
        if bool(decisive.any()):
            return _fires(trial, name, tensor, measured.got, measured.want, decisive, measured.tiles, inputs)
        inexact += int(differs.sum())
    if inexact:
        reason = f"{inexact} entries are off by less than half a unit (exactness is {promise})"
        return Outcome(check=name, tier=TIER, status="not-applicable", reason=reason)
    return Outcome(check=name, tier=TIER, status="ok", reason="every bit agrees with the truth")


def _fires(
    trial: Trial,
    name: str,
    tensor: str,
    got: Tensor,
    want: Tensor,
    wrong: Tensor,
    tiles: TileMap,
    inputs: Inputs,
) -> Outcome:
    rows = wrong.flatten(2).any(-1)
    row, head = rows.nonzero()[0].tolist()
    at = wrong[row, head].flatten().nonzero()[0]
    place = place_of_row(tiles, row, head, "wrong")
    value, right = float(got[row, head].flatten()[at]), float(want[row, head].flatten()[at])
    reading = reading_of(inputs, tensor, row, head, got[row, head])
    companion = "" if name == NAME else "on an exact case of the same shape, "
    return Outcome(
        check=name, tier=TIER, status="fires", place=place,
        reason=f"{companion}{tensor} at {where(place)} is {value:g} and must be exactly {right:g}{reading} "
        f"({int(rows.sum())} of {rows.numel()} rows are wrong)",
        numbers={"got": value, "want": right, "wrong_rows": int(rows.sum()),
                 "would_pass": {"atol": float((got.double() - want).abs().nan_to_num(torch.inf).max())}},
    )  # fmt: skip
