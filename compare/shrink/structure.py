"""Structural changes: fewer axes, sequences, heads, tokens and dimensions, the large steps first.

The idea: each pass is a generator that reads the box's current best, yields candidates, and looks after each
whether the box has taken it: then it goes on from there, else it tries the next. So one deletion size is used
up before the next smaller one begins, and nothing is tried twice. Deleted lengths include the multiples of 64
and 16, since faults at chunk boundaries live on a length's remainder.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from ...capture.case import Case, starting_state
from ...reference.truth import truth
from ..axes.recase import starts
from ..axes.schedule import cuts_of
from ..inputs import inputs_of, take_sequences
from ..verdict import Place
from .candidate import KEY_TENSORS, TOKEN_TENSORS, VALUE_TENSORS, Candidate

Candidates = Iterator[Candidate]
# Positions of one deletion size that are tried in one round.
MOST_POSITIONS = 48


class Box:
    """The best so far, which passes read and the search replaces."""

    def __init__(self, best: Candidate, place: Place | None, seed: int, least_dims: tuple[int, int]) -> None:
        self.best, self.place, self.seed, self.least_dims = best, place, seed, least_dims


def axes(box: Box) -> Candidates:
    """All axes back to the baseline at once, then each."""
    if len(box.best.deviations) > 1:
        yield box.best.with_deviations({}, "every axis at the baseline")
    for name in list(box.best.deviations):
        if name in box.best.deviations:
            rest = {n: v for n, v in box.best.deviations.items() if n != name}
            yield box.best.with_deviations(rest, f"{name} at the baseline")


def splits(box: Box) -> Candidates:
    """Fewer cuts, and cuts by their number, so that they stay where they are when tokens go."""
    word = box.best.deviations.get("split")
    if word is None:
        return
    dice = torch.Generator().manual_seed(box.seed + 101)
    found = [cut for n in box.best.case.lengths for cut in schedule_cuts(n, word, dice)]
    for cut in dict.fromkeys(found):
        if word != f"at-{cut}":
            yield box.best.with_deviations(
                {**box.best.deviations, "split": f"at-{cut}"}, f"one cut, at token {cut}"
            )
        if box.best.deviations.get("split") != word:
            return


def schedule_cuts(length: int, word: str, dice: torch.Generator) -> list[int]:
    """Where a schedule cuts one sequence, `every-N` as if it were alone."""
    if word.startswith("every-"):
        return list(range(int(word.removeprefix("every-")), length, int(word.removeprefix("every-"))))
    return cuts_of(length, word, dice)


def sequences(box: Box) -> Candidates:
    """One sequence alone, the failing one first; neighbouring pairs; then without parts of the rest."""
    n = box.best.case.n_sequences
    if n < 2:
        return
    wanted = box.place.sequence if box.place is not None else None
    order = (
        list(range(n)) if wanted is None or wanted >= n else sorted(range(n), key=lambda i: abs(i - wanted))
    )
    start = box.best
    for i in order:
        yield _kept(start, [i], f"sequence {i} alone")
        if box.best is not start:
            return
    if n > 2:
        pairs = [(i, i + 1) for i in range(n - 1)]
        if wanted is not None:
            pairs.sort(key=lambda p: min(abs(i - wanted) for i in p))
        for pair in pairs:
            yield _kept(start, list(pair), f"sequences {pair[0]} and {pair[1]} alone")
            if box.best is not start:
                return
    for size in _halving(n // 2):
        first = 0
        while first < box.best.case.n_sequences > size:
            gone = range(first, first + size)
            rest = [i for i in range(box.best.case.n_sequences) if i not in gone]
            candidate = _kept(box.best, rest, f"{size} sequence(s) dropped")
            yield candidate
            if box.best is not candidate:
                first += size


def _kept(candidate: Candidate, numbers: list[int], change: str) -> Candidate:
    return candidate.with_case(keep_sequences(candidate.case, numbers), change)


def keep_sequences(case: Case, numbers: list[int]) -> Case:
    """Some sequences, with their rows, states and slots; the pool stays whole."""
    at = starts(case)
    spans = [(at[n], at[n + 1]) for n in numbers]
    return _rows(case, spans, numbers)


def _rows(case: Case, spans: list[tuple[int, int]], numbers: list[int]) -> Case:
    """Spans of packed rows as the sequences `numbers`."""
    rows = torch.cat([torch.arange(a, b) for a, b in spans] or [torch.zeros(0, dtype=torch.int64)])
    changed: dict[str, Tensor | None] = {name: case[name][rows] for name in TOKEN_TENSORS}
    lengths = torch.tensor([0, *(b - a for a, b in spans)]).cumsum(0)
    changed["cu_seqlens"] = lengths.to(case["cu_seqlens"].dtype)
    chosen = torch.tensor(numbers, dtype=torch.int64)
    for name in ("initial_state", "has_initial_state", "slot_indices"):
        if case.get(name) is not None:
            changed[name] = case[name][chosen]
    return case.with_tensors(**changed)


def pools(box: Box) -> Candidates:
    """States gathered instead of a pool; else only the slots that are owned, and one of nobody."""
    case = box.best.case
    if case.get("pool") is None:
        return
    state = starting_state(case)
    yield box.best.with_case(
        case.with_tensors(pool=None, slot_indices=None, initial_state=state), "states gathered from the pool"
    )
    if box.best.case.get("pool") is None:
        return
    slots = case["slot_indices"].long()
    owned = sorted({int(s) for s in slots if s >= 0})
    for spare in (0, 1):
        rest = [i for i in range(case["pool"].shape[0]) if i not in owned][:spare]
        rows = sorted([*owned, *rest])
        if len(rows) == case["pool"].shape[0]:
            continue
        number = torch.tensor([rows.index(int(s)) if s >= 0 else -1 for s in slots])
        candidate = box.best.with_case(
            case.with_tensors(pool=case["pool"][rows], slot_indices=number.to(case["slot_indices"].dtype)),
            f"a pool of {len(rows)} slots",
        )
        yield candidate
        if box.best is candidate:
            return


def states(box: Box) -> Candidates:
    """No initial state at all; no flags; fresh sequences without their rows."""
    for names in (("initial_state", "has_initial_state"), ("has_initial_state",)):
        present = [n for n in names if box.best.case.get(n) is not None]
        if present and (len(names) == 1 or "initial_state" in present):
            yield box.best.with_case(
                box.best.case.with_tensors(**dict.fromkeys(present)), f"without {' and '.join(present)}"
            )


def heads(box: Box) -> Candidates:
    """One value head with its key head, the failing one first; then halves of the groups and of each."""
    case = box.best.case
    n_value, n_key = case["v"].shape[1], case["q"].shape[1]
    if n_value == 1 and n_key == 1:
        return
    wanted = box.place.head if box.place is not None else None
    order = sorted(range(n_value), key=lambda h: 0 if h == wanted else 1)
    start = box.best
    for head in order[:MOST_POSITIONS]:
        yield _with_heads(start, [head // (n_value // n_key)], [head], f"value head {head} alone")
        if box.best is not start:
            return
    for size in _halving(n_key // 2):
        first = 0
        while first < _n(box, "q") > size:
            group = _n(box, "v") // _n(box, "q")
            keys = [h for h in range(_n(box, "q")) if not first <= h < first + size]
            values = [h * group + i for h in keys for i in range(group)]
            candidate = _with_heads(box.best, keys, values, f"{size} key head(s) dropped")
            yield candidate
            if box.best is not candidate:
                first += size
    for size in _halving(_n(box, "v") // _n(box, "q") // 2):
        first = 0
        while first < _n(box, "v") // _n(box, "q") > size:
            keys, group = list(range(_n(box, "q"))), _n(box, "v") // _n(box, "q")
            kept = [i for i in range(group) if not first <= i < first + size]
            values = [h * group + i for h in keys for i in kept]
            candidate = _with_heads(box.best, keys, values, f"{size} value head(s) of each key head dropped")
            yield candidate
            if box.best is not candidate:
                first += size


def _n(box: Box, name: str) -> int:
    return int(box.best.case[name].shape[1])


def _with_heads(candidate: Candidate, keys: list[int], values: list[int], change: str) -> Candidate:
    case = candidate.case
    changed: dict[str, Tensor | None] = {n: case[n][:, keys] for n in KEY_TENSORS}
    changed |= {n: case[n][:, values] for n in VALUE_TENSORS}
    for name in ("initial_state", "pool"):
        if case.get(name) is not None:
            changed[name] = case[name][:, values]
    return candidate.with_case(case.with_tensors(**changed), change)


def tokens(box: Box) -> Candidates:
    """Tokens of each sequence: up to the failing one, then ever smaller stretches from the tail on."""
    for number in range(box.best.case.n_sequences - 1, -1, -1):
        yield from _prefix(box, number)
        for size in deletion_sizes(box.best.case.lengths[number]):
            if size < box.best.case.n_tokens:
                yield from _stretches(box, number, size)


def _prefix(box: Box, number: int) -> Candidates:
    place, length = box.place, box.best.case.lengths[number]
    if place is None or place.token is None or place.sequence not in (number, None):
        return
    for wanted in (place.token + 1, 64 * (place.token // 64 + 1)):
        if wanted < box.best.case.lengths[number]:
            yield from _deleted(box, number, wanted, length - wanted)


def deletion_sizes(length: int) -> list[int]:
    """Numbers of tokens to delete at once, descending: halves, and multiples of 64 and of 16."""
    sizes = {length, *_halving(length)} if length else set()
    for tile in (64, 16):
        sizes |= {tile * n for n in _halving(max(length - 1, 0) // tile)}
        if length > tile:
            sizes.add((length - 1) // tile * tile)
            sizes.add(length - tile)
    return sorted((s for s in sizes if 0 < s <= length), reverse=True)


def _stretches(box: Box, number: int, size: int) -> Candidates:
    """Delete `size` tokens, wherever they may go: at the tail, at the head, in between."""
    while True:
        length = box.best.case.lengths[number]
        if size > length or size >= box.best.case.n_tokens:
            return
        places = _positions(length, size)
        for first in places:
            before = box.best
            yield from _deleted(box, number, first, size)
            if box.best is not before:
                break
        else:
            return


def _positions(length: int, size: int) -> list[int]:
    """Where a stretch may begin: at the tail, at the head, and in between in steps of half its size."""
    tail = length - size
    step = max(1, size // 2, tail // MOST_POSITIONS)
    return list(dict.fromkeys([tail, 0, *range(tail - step, 0, -step)]))


def _deleted(box: Box, number: int, first: int, size: int) -> Candidates:
    """Without tokens [first, first + size) of a sequence; at its head also from the state they leave."""
    case, best = box.best.case, box.best
    at = starts(case)
    begin, end = at[number], at[number + 1]
    spans: list[tuple[int, int]] = []
    for i, span in enumerate(itertools.pairwise(at)):
        spans.append(span if i != number else (begin, end))
    keep = torch.ones(case.n_tokens, dtype=torch.bool)
    keep[begin + first : begin + first + size] = False
    lengths = [b - a for a, b in spans]
    lengths[number] -= size
    changed: dict[str, Tensor | None] = {name: case[name][keep] for name in TOKEN_TENSORS}
    changed["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(case["cu_seqlens"].dtype)
    smaller = case.with_tensors(**changed)
    what = f"tokens {first} to {first + size - 1} of sequence {number} dropped"
    if first == 0 and lengths[number] > 0:
        handed = _with_state_behind(case, smaller, number, size)
        if handed is not None:
            yield best.with_case(handed, f"{what}, starting from the state that they leave")
            if box.best is not best:
                return
    yield best.with_case(smaller, what)


def _with_state_behind(case: Case, smaller: Case, number: int, tokens: int) -> Case | None:
    """The smaller case, its sequence starting from the truth's state behind the dropped tokens."""
    state = case.get("initial_state")
    if state is None or not bool(torch.isfinite(state).all()):
        return None
    part = take_sequences(inputs_of(case), [number], tokens=[tokens])
    _, behind = truth(**part.keywords())
    handed = state.clone()
    handed[number] = behind[0].to(state.dtype)
    flags = case.get("has_initial_state")
    if flags is not None:
        flags = flags.clone()
        flags[number] = True
    return smaller.with_tensors(initial_state=handed, has_initial_state=flags)


def dims(box: Box) -> Candidates:
    """Fewer channels, by powers of two, not below what the kernel is made for: K and V at once, then each."""
    for which in ("KV", "K", "V"):
        for n in (2**p for p in range(12)):
            start = box.best
            case = start.case
            sizes = {"K": case["q"].shape[-1], "V": case["v"].shape[-1]}
            if any(not box.least_dims["KV".index(name)] <= n < sizes[name] for name in which):
                continue
            for last in (False, True):
                smaller = case
                for name in which:
                    smaller = _channels(smaller, name, sizes[name] - n if last else 0, n)
                yield start.with_case(smaller, f"{' = '.join(which)} = {n}")
                if box.best is not start:
                    break
            if box.best is not start:
                break


def _channels(case: Case, what: str, first: int, n: int) -> Case:
    """Channels [first, first + n) of K or V; normalised keys and queries keep their length."""
    part = slice(first, first + n)
    changed: dict[str, Tensor | None] = {}
    if what == "V":
        changed["v"] = case["v"][..., part].contiguous()
    else:
        for name in KEY_TENSORS:
            changed[name] = _same_length(case[name], case[name][..., part], case.options.qk == "normalised")
        if case["g"].dim() == 3:
            changed["g"] = case["g"][..., part].contiguous()
    for name in ("initial_state", "pool"):
        state = case.get(name)
        if state is not None:
            changed[name] = (state[..., part] if what == "V" else state[..., part, :]).contiguous()
    return case.with_tensors(**changed)


def _same_length(whole: Tensor, part: Tensor, normalised: bool) -> Tensor:
    if not normalised:
        return part.contiguous()
    wide = part.double()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    wanted = torch.linalg.vector_norm(whole.double(), dim=-1, keepdim=True)
    return torch.where(length > 0, wide * (wanted / length.clamp(min=1e-300)), wide).to(whole.dtype)


def _halving(size: int) -> list[int]:
    """size, size/2, ..., 1; nothing for 0."""
    found = []
    while size > 0:
        found.append(size)
        size //= 2
    return found
