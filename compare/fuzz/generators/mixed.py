"""Mixed cases: sequences of different families in one packing, so that one's numbers beside another's
show."""

from __future__ import annotations

from ..dice import Dice
from ..recipe import Recipe
from .fresh import draw_pieces, draw_twists, stock_number
from .generator import Generator, Surroundings
from .lengths import draw_lengths


def draw(dice: Dice, around: Surroundings) -> Recipe | None:
    limits, stock = around.limits, around.stock
    if limits.max_sequences < 2:
        return None
    shape = around.shape
    number = stock_number(dice, around.number)
    first = dice.one_of(around.families)
    wanted = stock.source(shape, first, number).options
    # One call has one scale, and one word for whether q and k are normalised.
    others = [f for f in around.families if stock.source(shape, f, number).options == wanted]
    families = {first, dice.one_of(others), dice.one_of(others)}
    sources = [(f, number, stock.source(shape, f, number).length) for f in sorted(families)]
    lengths = draw_lengths(dice, limits)
    if len(lengths) < 2:
        lengths = [*lengths, dice.between(1, 3)]
    return Recipe(
        shape=shape,
        pieces=draw_pieces(dice, sources, lengths),
        twists=draw_twists(dice, len(lengths), stock.shapes[shape].v_heads),
        deviations=around.deviations(dice),
        made_by="mixed",
    )


GENERATOR = Generator(name="mixed", what="sequences of several families in one call", weight=1.5, draw=draw)
