"""Prefill schedules: which tokens of which sequence are in which call.

The idea: a schedule is data, a list of steps, each a list of (sequence, first token, end), made from a word:
`none`, `every-N` (a budget of N tokens per call, shared by the sequences as an engine's
max_num_batched_tokens is), `at-P` (one cut in every sequence that is longer), `random`. P is a number,
`T-1` (before the last token), or `64n`, `64n+1`, `64n-1` (next to the middle multiple of 64).
Running a schedule is `compare.sweep.engine`'s.
"""

from __future__ import annotations

import itertools
import re

import torch

Segment = tuple[int, int, int]
Step = list[Segment]

GRAMMAR = "none, every-N, at-P with P a number, T-1 or 64n+1, or random"
EVERY = re.compile(r"every-([1-9]\d*)")
AT = re.compile(r"at-(?:(?P<token>[1-9]\d*)|T-(?P<before>[1-9]\d*)|(?P<chunk>[1-9]\d*)n(?P<off>[+-]\d+)?)")
RANDOM_CUTS = 3


def is_schedule(word: str) -> bool:
    """Whether a word names a schedule."""
    return word in ("none", "random") or bool(EVERY.fullmatch(word) or AT.fullmatch(word))


def steps_of(lengths: list[int], word: str, *, seed: int = 0) -> list[Step]:
    """The calls of a schedule, in order; every token of every sequence once, empty sequences in the first."""
    if match := EVERY.fullmatch(word):
        return _by_budget(lengths, int(match[1]))
    dice = torch.Generator().manual_seed(seed + 101)
    pieces = [_pieces(n, cuts_of(n, word, dice), i) for i, n in enumerate(lengths)]
    n_steps = max((len(p) for p in pieces), default=0)
    return [[p[i] for p in pieces if i < len(p)] for i in range(n_steps)]


def cuts_of(length: int, word: str, dice: torch.Generator) -> list[int]:
    """Where one sequence is cut, ascending, each strictly inside it."""
    if word == "none":
        return []
    if word == "random":
        count = min(RANDOM_CUTS, max(length - 1, 0))
        return sorted((torch.randperm(max(length - 1, 0), generator=dice)[:count] + 1).tolist())
    match = AT.fullmatch(word)
    assert match is not None, word
    if match["token"]:
        cut = int(match["token"])
    elif match["before"]:
        cut = length - int(match["before"])
    else:
        size, off = int(match["chunk"]), int(match["off"] or 0)
        cut = size * max(1, length // size // 2) + off
    return [cut] if 0 < cut < length else []


def _pieces(length: int, cuts: list[int], sequence: int) -> Step:
    edges = [0, *cuts, length]
    return [(sequence, a, b) for a, b in itertools.pairwise(edges)]


def _by_budget(lengths: list[int], budget: int) -> list[Step]:
    """Fill each call with the sequences' next tokens, in order, up to the budget."""
    done = [0] * len(lengths)
    steps: list[Step] = []
    while not steps or any(d < n for d, n in zip(done, lengths, strict=True)):
        left, step = budget, []
        for i, n in enumerate(lengths):
            take = min(left, n - done[i])
            if take > 0 or (n == 0 and not steps):
                step.append((i, done[i], done[i] + take))
                done[i], left = done[i] + take, left - take
        steps.append(step)
    return steps
