"""Changes of a case that axes are made of: sequences taken, added, shortened; states given.

The idea: each gives a sound case of its own in canonical layout, with every tensor of the rule cut the same
way, so that the truth of the changed case is all that a verdict needs. What an engine recorded of the whole
call is dropped. Which change an axis makes is the axis's business.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ...capture.case import Case, starting_state

PER_TOKEN = ("q", "k", "v", "g", "beta")


def rule_only(case: Case) -> Case:
    """The rule's tensors alone, with the state gathered: [N, HV, K, V] `initial_state` or none.

    Fresh sequences (`has_initial_state` false) keep their flag and get zeros, whatever their slot held.
    """
    tensors: dict[str, Tensor | None] = {name: None for name in case.tensors}
    tensors |= {name: case[name] for name in (*PER_TOKEN, "cu_seqlens")}
    state = starting_state(case)
    tensors["initial_state"] = state
    if state is not None and case.get("has_initial_state") is not None:
        tensors["has_initial_state"] = case["has_initial_state"]
    return case.with_tensors(**tensors)


def starts(case: Case) -> list[int]:
    """First packed row of every sequence, and T."""
    return [int(x) for x in case["cu_seqlens"]]


def sequences_of(case: Case, numbers: Sequence[int]) -> Case:
    """Some sequences, in the order given, as a case of its own."""
    at = starts(case)
    rows = torch.cat([torch.arange(at[n], at[n + 1]) for n in numbers] or [torch.zeros(0, dtype=torch.int64)])
    lengths = [at[n + 1] - at[n] for n in numbers]
    return rows_as(rule_only(case), rows, lengths, list(numbers))


def shortened(case: Case, n_tokens: int) -> Case:
    """Every sequence cut to its first n_tokens; the rule is causal, so each is a sound prefix."""
    at = starts(case)
    lengths = [min(n_tokens, b - a) for a, b in itertools.pairwise(at)]
    rows = torch.cat([torch.arange(a, a + n) for a, n in zip(at, lengths, strict=False)])
    return rows_as(rule_only(case), rows, lengths, list(range(len(lengths))))


def rows_as(case: Case, rows: Tensor, lengths: list[int], numbers: list[int]) -> Case:
    """Packed rows as sequences of these lengths that start from the states of sequences `numbers`."""
    chosen = torch.tensor(numbers, dtype=torch.int64)
    changed: dict[str, Tensor | None] = {name: case[name][rows] for name in PER_TOKEN}
    changed["cu_seqlens"] = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    for name in ("initial_state", "has_initial_state"):
        if case.get(name) is not None:
            changed[name] = case[name][chosen]
    return case.with_tensors(**changed)


def joined(parts: Sequence[Case]) -> Case:
    """Several cases of one shape (heads, dims, dtypes) as one packed call, in order.

    A part without a state starts from zeros beside one that has a state.
    """
    parts = [rule_only(part) for part in parts]
    changed: dict[str, Tensor | None] = {n: torch.cat([p[n] for p in parts]) for n in PER_TOKEN}
    lengths = [length for part in parts for length in part.lengths]
    changed["cu_seqlens"] = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    known = next((p["initial_state"] for p in parts if p.get("initial_state") is not None), None)
    if known is not None:
        states = [p.get("initial_state") for p in parts]
        changed["initial_state"] = torch.cat(
            [
                known.new_zeros(p.n_sequences, *known.shape[1:]) if s is None else s.to(known.dtype)
                for p, s in zip(parts, states, strict=True)
            ]
        )
        changed["has_initial_state"] = torch.cat([starts_from_state(p) for p in parts])
    return parts[0].with_tensors(**changed)


def starts_from_state(case: Case) -> Tensor:
    """[N] bool: which sequences start from a state rather than fresh."""
    flags = case.get("has_initial_state")
    if flags is not None:
        return flags.bool()
    has = case.get("initial_state") is not None or case.get("pool") is not None
    return torch.full((case.n_sequences,), has, dtype=torch.bool)


def neighbour(case: Case, length: int, *, seed: int) -> Case:
    """A sequence that could be another request: the case's own tokens, shuffled, from a state of its size."""
    dice = torch.Generator().manual_seed(seed)
    own = rule_only(case)
    rows = torch.randint(0, max(own.n_tokens, 1), (length,), generator=dice)
    other = rows_as(own, rows, [length], [0])
    state = other.get("initial_state")
    if state is None:
        return other
    return other.with_tensors(
        initial_state=state_like(own, 1, seed=seed).to(state.dtype),
        has_initial_state=torch.ones(1, dtype=torch.bool),
    )


def state_like(case: Case, n_states: int, *, seed: int, size: float | None = None) -> Tensor:
    """Random states [n, HV, K, V] float32; size: RMS of an entry, None for that of the case's own states.

    Where the case has none, the RMS that one token leaves (|k| |v| spread over K entries of a column).
    """
    dice = torch.Generator().manual_seed(seed + 7)
    v, key = case["v"], case["k"].shape[-1]
    if size is None:
        state = starting_state(case)
        size = float(state.float().square().mean().sqrt()) if state is not None and state.numel() else 0.0
        if not 0.0 < size < float("inf"):
            value = float(v.float().square().mean().sqrt()) if v.numel() else 1.0
            size = max(value, 1e-3) * key**-0.5
    return torch.randn(n_states, v.shape[1], key, v.shape[2], generator=dice) * size
