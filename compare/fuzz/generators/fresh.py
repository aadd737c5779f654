"""Fresh cases: windows of one synthetic family's stock, with lengths at chunk edges, states and twists."""

from __future__ import annotations

from collections.abc import Sequence

from ..dice import Dice
from ..recipe import Piece, Recipe, Twist
from ..twists import draw_twist
from .generator import Generator, Surroundings
from .lengths import draw_lengths

# Cases that draw from the same stocks before the next are made; and stocks among which they choose.
CASES_PER_STOCK, STOCKS = 4096, 2
STARTS = {"fresh": 1.0, "zeros": 0.5, "random": 2.0}


def stock_number(dice: Dice, number: int) -> int:
    """Which stock of a family a case draws from."""
    return number // CASES_PER_STOCK * STOCKS + dice.between(0, STOCKS - 1)


def draw_starts(dice: Dice, n: int) -> list[str]:
    """A state for every sequence: all alike, as a rule."""
    if dice.chance(0.7):
        return [dice.weighted(STARTS)] * n
    return [dice.weighted(STARTS) for _ in range(n)]


def draw_pieces(
    dice: Dice, sources: Sequence[tuple[str, int, int]], lengths: Sequence[int]
) -> tuple[Piece, ...]:
    """A window for every sequence. sources: (name, stock, tokens that it has)."""
    pieces = []
    for length, start in zip(lengths, draw_starts(dice, len(lengths)), strict=True):
        name, stock, have = dice.one_of(sources)
        at = 0 if dice.chance(0.2) else dice.between(0, max(0, have - length))
        pieces.append(Piece(name, stock, at, length, start))
    return tuple(pieces)


def draw_twists(dice: Dice, n_sequences: int, heads: int) -> tuple[Twist, ...]:
    """None to three."""
    count = 0
    while count < 3 and dice.chance(0.4):
        count += 1
    return tuple(draw_twist(dice, n_sequences, heads) for _ in range(count))


def draw(dice: Dice, around: Surroundings) -> Recipe | None:
    stock = around.stock
    shape = around.shape
    family = dice.one_of(around.families)
    number = stock_number(dice, around.number)
    lengths = draw_lengths(dice, around.limits)
    have = stock.source(shape, family, number).length
    return Recipe(
        shape=shape,
        pieces=draw_pieces(dice, [(family, number, have)], lengths),
        twists=draw_twists(dice, len(lengths), stock.shapes[shape].v_heads),
        deviations=around.deviations(dice),
        made_by="fresh",
    )


GENERATOR = Generator(name="fresh", what="windows of a synthetic family", weight=4.0, draw=draw)
