"""Mutated cases: a case of the corpus with one to three small changes, or crossed with another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ..dice import Dice
from ..recipe import Piece, Recipe
from ..twists import TWISTS, draw_twist
from .fresh import STARTS
from .generator import CorpusEntry, Generator, Limits, Surroundings
from .lengths import draw_length

Mutation = Callable[[Dice, Recipe, Surroundings], Recipe]


def _replace(recipe: Recipe, **changed: object) -> Recipe:
    return msgspec.structs.replace(recipe, **changed)


def _one_piece(dice: Dice, recipe: Recipe, **changed: object) -> Recipe:
    i = dice.between(0, len(recipe.pieces) - 1)
    pieces = list(recipe.pieces)
    pieces[i] = msgspec.structs.replace(pieces[i], **changed)
    return _replace(recipe, pieces=tuple(pieces))


def _length(dice: Dice, recipe: Recipe, around: Surroundings) -> Recipe:
    """Another length: a token more or less, a chunk more or less, or one drawn anew."""
    i = dice.between(0, len(recipe.pieces) - 1)
    step = dice.one_of((-64, -16, -1, 1, 16, 64, 0))
    length = recipe.pieces[i].length + step if step else draw_length(dice, around.limits.max_tokens)
    pieces = list(recipe.pieces)
    pieces[i] = msgspec.structs.replace(pieces[i], length=max(1, length))
    return _replace(recipe, pieces=tuple(pieces))


def _window(dice: Dice, recipe: Recipe, around: Surroundings) -> Recipe:
    return _one_piece(dice, recipe, at=dice.between(0, 2 * around.limits.max_tokens))


def _start(dice: Dice, recipe: Recipe, around: Surroundings) -> Recipe:
    return _one_piece(dice, recipe, start=dice.weighted(STARTS))


def _drop(dice: Dice, recipe: Recipe, around: Surroundings) -> Recipe:
    if len(recipe.pieces) < 2:
        return recipe
    gone = dice.between(0, len(recipe.pieces) - 1)
    return _replace(recipe, pieces=tuple(p for i, p in enumerate(recipe.pieces) if i != gone))


def _double(dice: Dice, recipe: Recipe, around: Surroundings) -> Recipe:
    """The same sequence twice, or one token of it beside it."""
    piece = dice.one_of(recipe.pieces)
    if dice.chance(0.5):
        piece = msgspec.structs.replace(piece, length=1)
    at = dice.between(0, len(recipe.pieces))
    return _replace(recipe, pieces=(*recipe.pieces[:at], piece, *recipe.pieces[at:]))


def _twist(dice: Dice, recipe: Recipe, around: Surroundings) -> Recipe:
    """One twist more, one fewer, or one of another size or at the next token."""
    heads = around.stock.shapes[recipe.shape].v_heads
    kept = list(recipe.twists)
    what = dice.one_of(("more", "fewer", "size", "at")) if kept else "more"
    if what == "more":
        return _replace(recipe, twists=(*kept[-3:], draw_twist(dice, len(recipe.pieces), heads)))
    i = dice.between(0, len(kept) - 1)
    if what == "fewer":
        del kept[i]
    elif what == "size":
        kept[i] = msgspec.structs.replace(kept[i], size=TWISTS[kept[i].name].size(dice))
    else:
        kept[i] = msgspec.structs.replace(kept[i], at=kept[i].at + dice.one_of((-1, 1)))
    return _replace(recipe, twists=tuple(kept))


def _deviations(dice: Dice, recipe: Recipe, around: Surroundings) -> Recipe:
    """Other axes, or one of them fewer."""
    if recipe.deviations and dice.chance(0.5):
        gone = dice.one_of(sorted(recipe.deviations))
        return _replace(recipe, deviations={n: v for n, v in recipe.deviations.items() if n != gone})
    return _replace(recipe, deviations={**recipe.deviations, **around.deviations(dice)})


MUTATIONS: tuple[Mutation, ...] = (
    _length, _length, _window, _start, _drop, _double, _twist, _twist, _deviations,
)  # fmt: skip


def _crossed(dice: Dice, recipe: Recipe, other: Recipe, around: Surroundings) -> Recipe:
    """A piece of another case beside this one's, where both may share a call; else its twists."""
    if other.shape == recipe.shape and around.limits.max_sequences > 1:
        mine, piece = recipe.pieces[0], dice.one_of(other.pieces)
        if _options(around, recipe.shape, mine) == _options(around, recipe.shape, piece):
            return _replace(recipe, pieces=(*recipe.pieces, piece))
    return _replace(recipe, twists=(recipe.twists + other.twists)[-4:])


def _options(around: Surroundings, shape: int, piece: Piece) -> object:
    return around.stock.source(shape, piece.source, piece.stock).options


def fitted(recipe: Recipe, limits: Limits) -> Recipe:
    """The recipe within the limits: sequences at the end are cut or left out, empties stand where they
    may."""
    left, pieces = limits.max_tokens, []
    for piece in recipe.pieces[: limits.max_sequences]:
        length = min(piece.length, left)
        if length or piece.length == 0:
            pieces.append(msgspec.structs.replace(piece, length=length))
        left -= length
    full = [p for p in pieces if p.length]
    if limits.empties == "none" or limits.max_sequences < 2:
        pieces = full
    elif limits.empties == "end":
        pieces = [*full, *(p for p in pieces if not p.length)]
    return _replace(recipe, pieces=tuple(pieces))


def chosen(dice: Dice, corpus: Sequence[CorpusEntry]) -> CorpusEntry:
    """One of the corpus; a recent one half of the time."""
    return dice.one_of(corpus[-8:]) if dice.chance(0.5) else dice.one_of(corpus)


def draw(dice: Dice, around: Surroundings) -> Recipe | None:
    if not around.corpus:
        return None
    fitting = [entry for entry in around.corpus if entry.recipe.shape == around.shape]
    entry = chosen(dice, fitting or around.corpus)
    recipe = entry.recipe
    if dice.chance(0.15):
        recipe = _crossed(dice, recipe, chosen(dice, around.corpus).recipe, around)
    for _ in range(dice.between(1, 3)):
        recipe = dice.one_of(MUTATIONS)(dice, recipe, around)
    recipe = fitted(recipe, around.limits)
    if recipe.n_tokens == 0:
        return None
    return _replace(recipe, made_by="mutated", parent=entry.number)


GENERATOR = Generator(name="mutated", what="cases that raised a maximum, changed", weight=6.0, draw=draw)
