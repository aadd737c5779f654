"""Lengths of sequences: most of them next to where chunk kernels change what they do.

The idea: a kernel's loops turn at multiples of its chunk (64) and of its sub-blocks (16), and masks matter
one token before and after. Uniform lengths would meet 64n + 1 once in 64.
"""

from __future__ import annotations

from ..dice import Dice
from .generator import Limits

KINDS = {"chunk": 3.0, "chunk+1": 3.0, "chunk-1": 2.5, "block+-1": 2.0, "few": 1.5, "any": 2.0}


def draw_length(dice: Dice, most: int, chunk_size: int = 64) -> int:
    """1..most."""
    kind = dice.weighted(KINDS)
    if kind == "few":
        length = dice.between(1, 4)
    elif kind == "any":
        length = dice.between(1, max(1, most))
    elif kind == "block+-1":
        length = 16 * dice.between(1, max(1, most // 16)) + dice.one_of((-1, 1))
    else:
        off = {"chunk": 0, "chunk+1": 1, "chunk-1": -1}[kind]
        # Few chunks show most faults, and cost least.
        n_max = max(1, most // chunk_size)
        n = 1 if dice.chance(0.4) else dice.between(1, n_max)
        length = chunk_size * n + off
    return min(max(1, length), most)


def draw_lengths(dice: Dice, limits: Limits) -> list[int]:
    """Lengths of the sequences of one case: usually one, else a packing with short and empty ones."""
    n = 1
    if limits.max_sequences > 1 and dice.chance(0.45):
        n = dice.between(2, 3) if dice.chance(0.7) else dice.between(4, limits.max_sequences)
    lengths: list[int] = []
    left = limits.max_tokens
    for i in range(n):
        rest = n - i - 1
        room = max(1, left - rest)
        length = 1 if i and dice.chance(0.2) else draw_length(dice, room, limits.chunk_size)
        lengths.append(length)
        left -= length
        if left <= rest:
            break
    return with_empties(dice, lengths, limits)


def with_empties(dice: Dice, lengths: list[int], limits: Limits) -> list[int]:
    """Some empty sequences, where the contract takes them."""
    if limits.max_sequences < 2 or limits.empties == "none" or not dice.chance(0.15):
        return lengths
    if limits.empties == "end":
        return [*lengths, 0]
    at = dice.between(0, len(lengths))
    return [*lengths[:at], 0, *lengths[at:]]
