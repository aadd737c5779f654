"""Is the input sound: judged before any kernel is, because bad input blames nobody.

The idea: a non-finite number is named first (tensor, sequence, token), a finite one outside the domain
with its consequence next. Either makes the verdict `out-of-contract`; what the kernel did with it (did it
keep the damage where the mathematics keeps it) is said in the same sentence by `containment`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from .checks import emulation_ratio
from .inputs import Inputs
from .report_words import number
from .soundness_words import locate
from .tiles import TileMap
from .trial import TENSORS, Trial
from .verdict import Outcome
from .witness import Witness

# Tensors in the order in which a bad one is named; token tensors first.
NAMED = ("q", "k", "v", "g", "beta")


class Soundness(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a case before a kernel runs."""

    sound: bool
    reason: str = ""
    """The first fault: tensor, token, value, consequence."""
    finite: bool = True
    """No tensor holds NaN or an infinity that matters (g = -inf is a reset)."""
    place: dict[str, Any] = {}
    """tensor, sequence, token, head of the first fault."""
    remarks: tuple[str, ...] = ()
    """What is unusual but inside the domain."""


def soundness_of(witness: Witness) -> Soundness:
    """Judge the inputs of a case."""
    inputs = witness.inputs
    return first_nonfinite_input(inputs) or Soundness(sound=True)


def first_nonfinite_input(inputs: Inputs) -> Soundness | None:
    """Name the earliest token whose inputs are not finite, else a state; None where all are."""
    earliest: tuple[int, str] | None = None
    for name in NAMED:
        row = first_bad_row(getattr(inputs, name), allow_reset=name == "g")
        if row is not None and (earliest is None or row < earliest[0]):
            earliest = (row, name)
    if earliest is not None:
        row, name = earliest
        sequence, token = locate(inputs.cu_seqlens, row)
        tensor = getattr(inputs, name)
        value = _first_bad_value(tensor[row], allow_reset=name == "g")
        reason = (
            f"the input is bad: {name} is {value} from token {token} of sequence {sequence} on"
            if inputs.n_sequences > 1
            else f"the input is bad: {name} is {value} from token {token} on"
        )
        return Soundness(
            sound=False,
            finite=False,
            reason=reason,
            place={"tensor": name, "sequence": sequence, "token": token},
        )
    if inputs.initial_state is None:
        return None
    row = first_bad_row(inputs.initial_state)
    if row is None:
        return None
    value = _first_bad_value(inputs.initial_state[row])
    return Soundness(
        sound=False, finite=False, place={"tensor": "initial_state", "sequence": row, "token": None},
        reason=f"the input is bad: initial_state of sequence {row} holds {value}",
    )  # fmt: skip


def first_bad_row(x: Tensor, *, allow_reset: bool = False) -> int | None:
    """First index of the leading dimension with a non-finite entry; -inf passes where it is a reset."""
    bad = ~torch.isfinite(x)
    if allow_reset:
        bad &= x != -torch.inf
    rows = bad.flatten(1).any(-1).nonzero()
    return int(rows[0]) if len(rows) else None


def _first_bad_value(x: Tensor, *, allow_reset: bool = False) -> str:
    bad = ~torch.isfinite(x)
    if allow_reset:
        bad &= x != -torch.inf
    value = float(x[bad][0])
    return "NaN" if value != value else ("+Inf" if value > 0 else "-Inf")


def containment(trial: Trial, soundness: Soundness) -> Outcome:
    """What the kernel did with bad input: whether the damage stayed where the mathematics has it.

    Damage may fill the chunk that it starts in (masked products multiply it by zero), in the heads and
    sequences where the truth has it; everything else must be finite and right.
    """
    allowed = {name: reach(trial, name) for name in trial.measured}
    numbers: dict[str, Any] = {}
    for name in TENSORS:
        measured = trial.measured.get(name)
        if measured is None:
            continue
        stray = (measured.masks.unexplained > 0) & ~allowed[name]
        if bool(stray.any()):
            row, head = stray.nonzero()[0].tolist()
            tiles = measured.tiles
            token = "" if tiles.token_of_row is None else f", token {int(tiles.token_of_row[row])}"
            reason = (
                f"the kernel did not contain it: {name} is not finite at sequence "
                f"{int(tiles.sequence_of_row[row])}, head {head}{token}, where the truth is"
            )
            return Outcome(check="containment", tier=1, status="suspect", reason=reason, numbers=numbers)
    if not soundness.finite:
        return _rest_is_right(trial, allowed)
    return _what_it_did(trial)


def reach(trial: Trial, name: str) -> Tensor:
    """[R, H] bool: rows that the damage may touch, from the truth's own mask, widened to chunk starts."""
    measured = trial.measured[name]
    damaged = ~torch.isfinite(measured.want.flatten(2)).all(-1)
    tiles: TileMap = measured.tiles
    if tiles.token_of_row is None:
        return damaged
    in_tile = torch.zeros(tiles.n_tiles, damaged.shape[1], dtype=torch.int64, device=damaged.device)
    in_tile.index_add_(0, tiles.tile_of_row, damaged.long())
    return damaged | (in_tile > 0)[tiles.tile_of_row]


def _rest_is_right(trial: Trial, allowed: dict[str, Tensor]) -> Outcome:
    """Judge the rows that the damage cannot reach, on a twin of the case with the damage taken out."""
    witness = trial.witness
    clean = Witness(_cleaned(witness), device=witness.device, seed=witness.seed)
    output = _graft(trial.output, clean.truth()[0], allowed["output"])
    state = None if trial.state is None else _graft(trial.state, clean.truth()[1], allowed["state"])
    outcome = emulation_ratio.check(Trial(clean, trial.info, output, state))
    untouched = int((~allowed["output"]).sum())
    if outcome.status == "fires":
        reason = f"the kernel did not contain it: {outcome.reason}"
        return Outcome(check="containment", tier=1, status="suspect", reason=reason, place=outcome.place)
    reason = (
        "the kernel contained it: other sequences and earlier chunks are finite and right"
        if untouched
        else "the damage reaches every row, so nothing can be said of the kernel"
    )
    return Outcome(
        check="containment", tier=1, status="ok", reason=reason, numbers={"untouched_rows": untouched}
    )


def _cleaned(witness: Witness) -> Any:
    """The case with non-finite entries replaced by zeros (a -inf gate stays)."""
    inputs = witness.inputs

    def clean(x: Tensor, *, keep_reset: bool = False) -> Tensor:
        usable = torch.isfinite(x) | ((x == -torch.inf) if keep_reset else False)
        return torch.where(usable, x, torch.zeros_like(x))

    tensors = {name: clean(getattr(inputs, name), keep_reset=name == "g") for name in NAMED}
    state = None if inputs.initial_state is None else clean(inputs.initial_state)
    changed = witness.case.with_tensors(
        **tensors, cu_seqlens=inputs.cu_seqlens, initial_state=state, has_initial_state=None, pool=None,
        slot_indices=None,
    )  # fmt: skip
    return msgspec.structs.replace(
        changed, options=msgspec.structs.replace(changed.options, gate_space="log", scale=inputs.scale)
    )


def _graft(got: Tensor, want: Tensor, rows: Tensor) -> Tensor:
    """The kernel's tensor with the rows that may be damaged replaced by the clean truth."""
    keep = rows.reshape(*rows.shape, *([1] * (got.ndim - 2)))
    return torch.where(keep, want.to(got.dtype), got)


def _what_it_did(trial: Trial) -> Outcome:
    """Finite input outside the domain: how far the kernel is from the truth there."""
    errors = ", ".join(f"{name} {number(m.relative)}" for name, m in trial.measured.items())
    bad = sum(m.masks.n_unexplained for m in trial.measured.values())
    if bad:
        reason = f"there the kernel gives {bad} non-finite entries where the truth is finite"
    else:
        reason = f"there the kernel's relative RMS error is {errors}"
    return Outcome(check="containment", tier=1, status="ok", reason=reason)
