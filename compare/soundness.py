"""Is the input sound: judged before any kernel is, because bad input blames nobody.

The idea: a non-finite number is named first (tensor, sequence, token), a finite one outside the domain
with its consequence next (`reference.domain` finds them). Either makes the verdict `out-of-contract`; what
the kernel did with it (did it keep the damage where the mathematics keeps it) is said in the same sentence
by `containment`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from ..reference.domain import check_domain, describe
from ..reference.domain_place import locate
from .checks import emulation_ratio
from .inputs import Inputs
from .report_words import number
from .trial import TENSORS, Trial
from .verdict import Outcome
from .witness import Witness

# Token tensors, in the order in which the rule reads them.
NAMED = ("q", "k", "v", "g", "beta")
MOST_REMARKS = 3


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
    reset: str = ""
    """The first g = -inf, in words: a reset to the recurrence, a NaN to kernels that subtract cumsums."""


def soundness_of(witness: Witness) -> Soundness:
    """Judge the inputs of a case by the domain check."""
    x, case = witness.inputs, witness.case
    pool = case.get("pool")
    # The gate as the case has it: a negative "linear" decay is a NaN once it is brought to log space.
    g = case["g"].to(x.device) if case.options.gate_space == "linear" else x.g
    findings = check_domain(
        x.q,
        x.k,
        x.v,
        g,
        x.beta,
        cu_seqlens=x.cu_seqlens,
        initial_state=x.initial_state,
        qk="raw" if x.l2norm else "normalised",
        gate_space=case.options.gate_space,
        scale=x.scale,
        slot_indices=case.get("slot_indices"),
        n_slots=None if pool is None else pool.shape[0],
    )
    remarks = tuple(describe(f) for f in findings if f.severity == "hint")
    finite = all(f.kind != "non-finite" for f in findings)
    worst = next((f for f in findings if f.severity != "hint"), None)
    if worst is None:
        return Soundness(sound=True, remarks=remarks[:MOST_REMARKS], reset=first_reset(x))
    words = "the input is bad" if worst.severity == "bad-input" else "the input is outside the domain"
    place = {"tensor": worst.tensor, "sequence": worst.sequence, "head": worst.head, "token": worst.token}
    return Soundness(
        sound=False,
        finite=finite,
        reason=f"{words}: {describe(worst)}",
        place=place,
        remarks=remarks[:MOST_REMARKS],
    )


def first_reset(inputs: Inputs) -> str:
    """`g is -Inf at token 5 of sequence 0, head 1`, or nothing."""
    where = (inputs.g == -torch.inf).flatten(1).any(-1).nonzero()
    if len(where) == 0:
        return ""
    row = int(where[0])
    sequence, token = locate(inputs.cu_seqlens, row)
    head = int((inputs.g[row] == -torch.inf).nonzero()[0, 0])
    return f"g is -Inf at token {token} of sequence {sequence}, head {head}"


def resets_promised(trial: Trial) -> bool:
    """Whether the kernel's contract has g = -inf as a reset."""
    return str(trial.info.contract.value("gate.inf", "")).startswith("-inf is a reset")


def without_resets(trial: Trial) -> Trial:
    """The trial with every row that a g = -inf can reach (from its chunk's start on) made right."""
    inputs, tiles = trial.witness.inputs, trial.witness.output_tiles(trial.reach_chunk)
    reset = (inputs.g == -torch.inf).flatten(2).any(-1) if inputs.g.ndim == 3 else inputs.g == -torch.inf
    in_tile = torch.zeros(tiles.n_tiles, inputs.heads, dtype=torch.int64, device=inputs.device)
    in_tile.index_add_(0, tiles.tile_of_row, reset.long())
    # Sequence by sequence: a tile is reached if it or an earlier one of its sequence has a reset.
    before = in_tile.cumsum(0)
    first_tile = torch.searchsorted(tiles.sequence, tiles.sequence)
    started = torch.where(first_tile[:, None] > 0, before[(first_tile - 1).clamp(min=0)], 0)
    reached = (before - started) > 0
    rows = reached[tiles.tile_of_row]
    states = torch.zeros(inputs.n_sequences, inputs.heads, dtype=torch.int64, device=inputs.device)
    states.index_add_(0, tiles.sequence, in_tile)
    output = _graft(trial.output, trial.truth[0], rows)
    state = None if trial.state is None else _graft(trial.state, trial.truth[1], states > 0)
    return Trial(trial.witness, trial.info, output, state)


def containment(trial: Trial, soundness: Soundness) -> Outcome:
    """What the kernel did with bad input: whether the damage stayed where the mathematics has it.

    Damage may fill the chunk that it starts in (masked products multiply it by zero), in the heads and
    sequences where the truth has it; everything else must be finite and right.
    """
    if soundness.finite:
        return _what_it_did(trial)
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
    return _rest_is_right(trial, allowed)


def reach(trial: Trial, name: str) -> Tensor:
    """[R, H] bool: rows that the damage may touch, from the truth's own mask, widened to chunk starts."""
    measured = trial.measured[name]
    damaged = ~torch.isfinite(measured.want.flatten(2)).all(-1)
    if name == "state":
        return damaged
    tiles = trial.witness.output_tiles(trial.reach_chunk)
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
        **tensors,
        cu_seqlens=inputs.cu_seqlens,
        initial_state=state,
        has_initial_state=None,
        pool=None,
        slot_indices=None,
    )
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
