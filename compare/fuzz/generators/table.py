"""The generators, and how one is chosen for a case."""

from __future__ import annotations

from ..dice import Dice
from ..recipe import Recipe
from . import captured, fresh, mixed, mutated
from .generator import Generator, Surroundings

GENERATORS: dict[str, Generator] = {
    g.name: g for g in (fresh.GENERATOR, mixed.GENERATOR, captured.GENERATOR, mutated.GENERATOR)
}


def draw_recipe(dice: Dice, around: Surroundings) -> Recipe:
    """The recipe of a case: generators by their weights, until one has something to offer."""
    weights = {name: generator.weight for name, generator in GENERATORS.items()}
    while True:
        name = dice.weighted(weights)
        recipe = GENERATORS[name].draw(dice, around)
        if recipe is not None:
            return recipe
        del weights[name]
        # `fresh` always has: families are never empty.
        assert weights
