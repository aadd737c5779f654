"""Hypotheses: when no declared clause explains a departure, which slightly different function would.

The idea: a transform changes the truth by d; the kernel departs from the truth by r. If r is d plus no more
than rounding, in every tile, the kernel computes that function. So each entry of the catalogue is tried, one
at a time, first on the head and sequence that departs most, and only what fits there on the whole case. A
fit is a hypothesis, never a pass. Only what a sound kernel may have as its contract and forgot to declare (an
eps, a floor, a dtype) makes the verdict `suspect`; the rest keeps `fail` and is named as what it looks like.

Leaves to others: the functions tried (`catalogue`), rounding (`checks.emulation_ratio`), the verdict
(`judge`).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from ..reference.truth import truth
from .catalogue import CATALOGUE, Entry, applicable
from .checks import emulation_ratio, low_bits, running_bound
from .inputs import Inputs, take_sequences
from .trial import Trial
from .verdict import Hypothesis, Outcome
from .witness import Pair
from .yardstick import measure

# Checks that a transform may explain; anything else that fires is beyond excuse.
EXPLAINABLE = frozenset({running_bound.NAME, emulation_ratio.NAME, low_bits.NAME})
# Share of the departure's squares that an entry must explain where the kernel departs most. Departing tiles
# are 1.5 times beyond rounding at least, so a true transform explains over half of them.
EXPLAINED = 0.5
MOST_FULL_TRIALS = 3


@dataclass(frozen=True)
class Focus:
    """The sequence and head that depart most."""

    sequence: int
    head: int
    tensor: str


def explain(trial: Trial, ordered: list[Outcome]) -> Hypothesis | None:
    """The entry of the catalogue that explains the whole answer; None where none does, or none applies.

    ordered: all outcomes. Nothing is tried where tier 3 does not fire, or a non-finite value does.
    """
    ratio = next((o for o in ordered if o.check == emulation_ratio.NAME), None)
    if ratio is None or ratio.status != "fires" or ratio.place is None:
        return None
    if any(m.masks.n_unexplained for m in trial.measured.values()) or trial.witness.inputs.g.ndim == 3:
        return None
    if ratio.place.sequence is None or ratio.place.head is None:
        return None
    focus = Focus(ratio.place.sequence, ratio.place.head, ratio.place.tensor)
    base = trial.witness.inputs_under(trial.clauses)
    entries = [entry for entry in CATALOGUE if applicable(entry, base)]
    scored = [(_explained_at(trial, base, entry, focus), entry) for entry in entries]
    likely = sorted((s for s in scored if s[0] >= EXPLAINED), key=lambda s: -s[0])
    for share, entry in likely[:MOST_FULL_TRIALS]:
        if _fits(trial, base, entry):
            excusable = entry.excusable and all(
                o.check in EXPLAINABLE and (o.check != low_bits.NAME or entry.rounds_state)
                for o in ordered
                if o.status == "fires"
            )
            return Hypothesis(clause=entry.id, text=entry.text, excusable=excusable, explained=share)
    return None


def _fits(trial: Trial, base: Inputs, entry: Entry) -> bool:
    """Whether tier 3 is silent everywhere when truth and yardstick are taken under the entry."""
    true = _truth(base, entry, trial.truth)
    candidate = Trial(trial.witness, trial.info, trial.output, trial.state)
    candidate.__dict__["yardstick"] = trial.yardstick
    if entry.inputs is not None:
        maps = (trial.witness.output_tiles(trial.capabilities_chunk), trial.witness.state_tiles)
        candidate.__dict__["yardstick"] = measure(
            _as_stored(entry.inputs(base), base), true, maps, profile=trial.profile,
            chunk_size=trial.capabilities_chunk, seed=trial.witness.seed, device=trial.device_type,
        )  # fmt: skip
    return emulation_ratio.against(candidate, candidate.measure(true)).status == "ok"


def _as_stored(changed: Inputs, base: Inputs) -> Inputs:
    """The entry's inputs in the dtypes that a kernel computing them would hold them in."""
    names = ("q", "k", "v", "beta", "initial_state")
    stored = {
        name: getattr(changed, name).to(getattr(base, name).dtype)
        for name in names
        if getattr(changed, name) is not None
    }
    return msgspec.structs.replace(changed, **stored)


def _truth(base: Inputs, entry: Entry, own: Pair) -> Pair:
    """The truth under an entry."""
    if entry.result is not None:
        return entry.result(base, own)
    assert entry.inputs is not None
    output, state = truth(**entry.inputs(base).keywords())
    return output, state


def _explained_at(trial: Trial, base: Inputs, entry: Entry, focus: Focus) -> float:
    """1 - |r - d|^2 / |r|^2 over the focus' sequence and head, in the tensor that departs."""
    index = 0 if focus.tensor == "output" else 1
    got = trial.output if index == 0 else trial.state
    if got is None:
        return 0.0
    rows = _rows(trial, focus, index)
    pure = trial.truth[index][rows, focus.head]
    if entry.result is not None:
        other = entry.result(base, trial.truth)[index][rows, focus.head]
    else:
        assert entry.inputs is not None
        sliced = one_head(take_sequences(entry.inputs(base), [focus.sequence]), focus.head)
        other = truth(**sliced.keywords())[index][:, 0]
    residual = got[rows, focus.head].double() - pure
    # A few wild rows of a wrong candidate must not hide the rest: NaN explains nothing.
    left = float((residual - (other - pure)).square().sum())
    whole = float(residual.square().sum())
    return 1 - left / whole if whole > 0 and left == left else 0.0


def _rows(trial: Trial, focus: Focus, index: int) -> Tensor:
    if index == 1:
        return torch.tensor([focus.sequence], device=trial.witness.device)
    start, end = (int(trial.witness.inputs.cu_seqlens[focus.sequence + i]) for i in (0, 1))
    return torch.arange(start, end, device=trial.witness.device)


def one_head(inputs: Inputs, head: int) -> Inputs:
    """The call with one value head and the key head that it reads."""
    key = head // (inputs.heads // inputs.q.shape[1])
    state = inputs.initial_state
    one = slice(head, head + 1)
    return msgspec.structs.replace(
        inputs,
        q=inputs.q[:, key : key + 1],
        k=inputs.k[:, key : key + 1],
        v=inputs.v[:, one],
        g=inputs.g[:, one],
        beta=inputs.beta[:, one],
        initial_state=None if state is None else state[:, one],
    )
