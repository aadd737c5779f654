"""States stored inside a prefill: is the state at token p the final state of the first p tokens?

The idea: an engine that caches prefixes keeps the states that its kernel passes through, and serves another
request from one of them days later. Nothing of the call that stored it shows a wrong one. So each stored
state is held against the float64 recurrence of its own prefix, by the limits that a final state has; one
that departs is compared with the states at all other places, which says whose it is.

Leaves to others: asking a kernel for them (`relations.checkpoints`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from ..reference.truth import truth
from .checks.emulation_ratio import ratios, wrong_rows
from .inputs import Inputs, take_sequences
from .nonfinite import compare_masks
from .report_words import number
from .tiles import TileMap, map_states, map_tokens, row_errors
from .trial import Measured, Trial
from .verdict import Outcome, Place
from .witness import DEFAULT_CHUNK
from .yardstick import Growing, Scale, decay_floors, honest_runs

NAME, TIER = "checkpoints", 4
# Of each sequence so many are judged, the first and the last among them: a truth has all heads' states.
MOST = 24
# A wrong state is somebody else's where it is within this of it, and this much nearer than to its own.
NEAR, NEARER = 0.05, 0.2


class Stored(NamedTuple):
    """One stored state: row of what was exported, and what it should be."""

    row: int
    sequence: int
    token: int
    """It is the state after so many tokens."""


def at_chunk_starts(lengths: Sequence[int], size: int) -> list[Stored]:
    """States at the start of every chunk, the sequences' chunks in order: after 0, C, 2C, ... tokens."""
    places = [(n, p) for n, length in enumerate(lengths) for p in range(0, length, size)]
    return [Stored(row, n, p) for row, (n, p) in enumerate(places)]


def at_every(lengths: Sequence[int], page: int) -> list[Stored]:
    """States after every full page of a sequence: after P, 2P, ... tokens."""
    places = [(n, p) for n, length in enumerate(lengths) for p in range(page, length + 1, page)]
    return [Stored(row, n, p) for row, (n, p) in enumerate(places)]


def chosen(places: Sequence[Stored], most: int = MOST) -> list[Stored]:
    """At most so many of each sequence, evenly spread, its first and last among them."""
    kept: list[Stored] = []
    for sequence in sorted({p.sequence for p in places}):
        own = [p for p in places if p.sequence == sequence]
        if len(own) > most:
            picks = {round(i * (len(own) - 1) / (most - 1)) for i in range(most)}
            own = [own[i] for i in sorted(picks)]
        kept += own
    return kept


def judge_checkpoints(trial: Trial, places: Sequence[Stored], exported: Tensor | None) -> Outcome:
    """Hold exported states [M, HV, K, V] against the truth of their prefixes.

    places: of all M rows; the trial gives inputs, clauses and precision. Raises nothing.
    """
    shape = (len(places), *trial.witness.inputs.v.shape[1:2], trial.witness.inputs.q.shape[-1])
    wanted = [*shape, trial.witness.inputs.v.shape[-1]]
    if exported is None or list(exported.shape) != wanted:
        came = "nothing" if exported is None else str(list(exported.shape))
        return _fires(f"{NAME}: {came} came back for {len(places)} stored states, not {wanted}", None, {})
    inputs, judged = trial.witness.inputs_under(trial.clauses), chosen(places)
    if not judged:
        return Outcome(check=NAME, tier=TIER, status="not-applicable", reason="no state is stored inside")
    true = states_at(inputs, judged)
    got = exported.to(true.device)[[p.row for p in judged]]
    tiles = map_states(len(judged), true.device)
    measured = Measured(got, true, tiles, row_errors(got, true), compare_masks(got, true))
    bad = _bad(trial, inputs, judged, measured)
    numbers = {"exercised": len(judged), "stored": len(places)}
    if not bool(bad.any()):
        return Outcome(check=NAME, tier=TIER, status="ok", numbers=numbers)
    at, head = bad.nonzero()[0].tolist()
    return _named(trial, judged, true, got, at, head, int(bad.sum()), numbers)


def states_at(inputs: Inputs, places: Sequence[Stored]) -> Tensor:
    """[P, HV, K, V] float64: the state after each place's tokens."""
    found: dict[tuple[int, int], Tensor] = {}
    for part, numbers, ends in _parts(inputs, places, found):
        _, states = truth(**part.keywords())
        found |= {(n, end): state for n, end, state in zip(numbers, ends, states, strict=True)}
    return torch.stack([found[p.sequence, p.token] for p in places])


def _parts(
    inputs: Inputs, places: Sequence[Stored], found: dict[tuple[int, int], Tensor]
) -> Iterator[tuple[Inputs, list[int], list[int]]]:
    """The sequences from place to place, side by side; each part starts from what was found before it."""
    stops: dict[int, list[int]] = {}
    for place in places:
        stops.setdefault(place.sequence, []).append(place.token)
    at = {n: 0 for n in stops}
    found |= {(n, 0): _start(inputs, n) for n in stops}
    for level in range(max((len(s) for s in stops.values()), default=0)):
        numbers = [n for n, s in stops.items() if level < len(s) and s[level] > at[n]]
        if not numbers:
            continue
        ends = [stops[n][level] for n in numbers]
        part = take_sequences(inputs, numbers, skip=[at[n] for n in numbers], tokens=ends)
        states = torch.stack([found[n, at[n]] for n in numbers])
        yield msgspec.structs.replace(part, initial_state=states), numbers, ends
        at |= dict(zip(numbers, ends, strict=True))


def _start(inputs: Inputs, sequence: int) -> Tensor:
    """[HV, K, V] float64."""
    if inputs.initial_state is not None:
        return inputs.initial_state[sequence].double()
    key, (heads, value) = inputs.q.shape[-1], inputs.v.shape[1:]
    return torch.zeros(heads, key, value, dtype=torch.float64, device=inputs.device)


def _bad(trial: Trial, inputs: Inputs, judged: Sequence[Stored], measured: Measured) -> Tensor:
    """[P, HV] bool: stored states that are not their prefix's."""
    if trial.witness.is_exact:
        stored = measured.want.to(measured.got.dtype).double()
        return (measured.got.double() != stored).flatten(2).any(-1)
    broken = measured.masks.unexplained > 0
    if inputs.g.ndim == 3:
        return broken
    scale = _honest(trial, inputs, judged, measured.want, measured.tiles)
    pooled = ratios(measured, scale).bad[scale.pools.pool_of_tile]
    # Small states are judged together; of a bad pool those are named that err by themselves, else the worst.
    alone = pooled & wrong_rows(measured, scale)
    worst = pooled & (measured.rows.square == measured.rows.square.amax(0, keepdim=True))
    return torch.where(alone.any(0, keepdim=True), alone, worst) | broken


def _honest(trial: Trial, inputs: Inputs, judged: Sequence[Stored], true: Tensor, tiles: TileMap) -> Scale:
    """What honest runs err at the same places."""
    growing = Growing(tiles, true)
    before = trial.info.capabilities.l2norm == "before" and inputs.l2norm
    runs = honest_runs(
        inputs, trial.profile, trial.capabilities_chunk, trial.witness.seed, l2norm_before=before,
        device=trial.device_type,
    )  # fmt: skip
    for run in runs:
        found: dict[tuple[int, int], Tensor] = {}
        for part, numbers, ends in _parts(inputs, judged, found):
            states = run.on(part)().final_state
            found |= {(n, end): state for n, end, state in zip(numbers, ends, states, strict=True)}
        growing.add(torch.stack([found[p.sequence, p.token].float() for p in judged]), cap=run.cap)
    tokens = map_tokens(inputs.cu_seqlens, trial.capabilities_chunk or DEFAULT_CHUNK)
    everyone = map_states(inputs.n_sequences, inputs.device)
    floor = decay_floors(inputs, tokens, everyone)[1]
    of_place = floor[torch.tensor([p.sequence for p in judged], device=floor.device)]
    return growing.scale(of_place, float32=inputs.v.dtype == torch.float32)


def _named(
    trial: Trial, judged: Sequence[Stored], true: Tensor, got: Tensor, at: int, head: int, n_bad: int,
    numbers: dict[str, int],
) -> Outcome:  # fmt: skip
    """The first wrong state, and whose it is."""
    place, state = judged[at], got[at, head].double()
    where = f"the state stored after {place.token} tokens of sequence {place.sequence}"
    finite = bool(torch.isfinite(state).all())
    own = _distance(state, true[at, head])
    words = "was not written (NaN in fresh memory)" if not finite else f"is off by {number(own)}, relatively"
    guess = _whose(trial, judged, true, state, at, head, own) if finite else ""
    reason = f"{NAME}: {where} {words} (head {head}; {n_bad} of {true.shape[0] * true.shape[1]} wrong){guess}"
    found = Place(
        tensor="state", class_="wrong" if finite else "nan", sequence=place.sequence, head=head,
        chunk=place.token // (trial.capabilities_chunk or DEFAULT_CHUNK), token=place.token,
    )  # fmt: skip
    return _fires(reason, found, {**numbers, "wrong": n_bad, "error": own, "would_pass": {"rtol": own}})


def _whose(
    trial: Trial, judged: Sequence[Stored], true: Tensor, state: Tensor, at: int, head: int, own: float
) -> str:
    """Another place's state that this one is, in words."""
    others = [(f"after {p.token} tokens of sequence {p.sequence}", true[i, head])
              for i, p in enumerate(judged) if i != at]  # fmt: skip
    final, inputs = trial.truth[1], trial.witness.inputs_under(trial.clauses)
    others += [(f"after all tokens of sequence {n}", final[n, head]) for n in range(final.shape[0])]
    others += [(f"that sequence {n} starts from", _start(inputs, n)[head]) for n in range(final.shape[0])]
    near = [(_distance(state, other), words) for words, other in others]
    best = min(near, default=None)
    if best is None or best[0] > min(NEAR, NEARER * own):
        return ""
    return f"; it is the state {best[1]}"


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-300))


def _fires(reason: str, place: Place | None, numbers: dict[str, object]) -> Outcome:
    return Outcome(check=NAME, tier=TIER, status="fires", reason=reason, place=place, numbers=numbers)
