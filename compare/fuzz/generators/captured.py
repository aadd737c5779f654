"""Captured cases: cut, recombined with others of their shape, re-split; synthetic neighbours among them."""

from __future__ import annotations

from ..dice import Dice
from ..recipe import Piece, Recipe
from .fresh import draw_starts, draw_twists
from .generator import Generator, Surroundings
from .lengths import draw_lengths


def draw(dice: Dice, around: Surroundings) -> Recipe | None:
    stock = around.stock
    shapes = [i for i in range(len(stock.shapes)) if stock.captures_of(i)]
    if not shapes:
        return None
    shape = dice.one_of(shapes)
    names = stock.captures_of(shape)
    first = dice.one_of(names)
    wanted = stock.source(shape, first, 0).options
    fitting = [n for n in names if stock.source(shape, n, 0).options == wanted]
    lengths = draw_lengths(dice, around.limits)
    pieces = []
    for i, (length, start) in enumerate(zip(lengths, draw_starts(dice, len(lengths)), strict=True)):
        name = first if i == 0 else dice.one_of(fitting)
        source = stock.source(shape, name, 0)
        # From where a sequence of the capture starts, as often as from anywhere.
        at = dice.one_of(source.starts) if dice.chance(0.3) else dice.between(0, source.length - 1)
        pieces.append(Piece(name, 0, at, length, start))
    twists = draw_twists(dice, len(lengths), stock.shapes[shape].v_heads) if dice.chance(0.5) else ()
    return Recipe(
        shape=shape, pieces=tuple(pieces), twists=twists, deviations=around.deviations(dice),
        made_by="captured",
    )  # fmt: skip


GENERATOR = Generator(name="captured", what="windows of captures, recombined", weight=6.0, draw=draw)
