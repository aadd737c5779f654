"""Seeded values in place of captured ones: the same failure on numbers that anybody may see.

The idea: tensors that shrinking left with one value are written as that value, which says nothing of a model;
the rest are drawn from a seed with the original's shape, dtype and size. That is a case of its own, so it
counts only if the kernel fails on it in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import torch
from torch import Tensor

from ...capture.case import Case, Origin
from ..axes.recase import rule_only

SEEDS = 12
NOTE = "seeded values"
DRAWN = ("q", "k", "v", "g", "beta", "initial_state")


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How a tensor is made: one value everywhere, unit vectors, or drawn."""

    kind: str
    """`full`, `first` (unit vectors e_0), `turn` (e_(t mod K)), `normal` or `uniform`."""
    size: float
    """The value; the RMS of a normal draw; the largest of a uniform one."""


def recipe_of(name: str, x: Tensor, unit: bool) -> Recipe:
    """The plainest recipe that gives a tensor of this kind. unit: rows of q and k have length 1."""
    wide = x.double()
    values = torch.unique(wide)
    if len(values) == 1:
        return Recipe(kind="full", size=float(values[0]))
    if name in ("q", "k"):
        for kind in ("first", "turn"):
            if torch.equal(wide, unit_vectors(x.shape, kind).double()):
                return Recipe(kind=kind, size=1.0)
    if name in ("g", "beta"):
        return Recipe(kind="uniform", size=_plain(float(wide.abs().max())) * (-1.0 if name == "g" else 1.0))
    length = x.shape[-1] if name in ("q", "k") else 1
    size = _plain(float((wide.square().mean() * length).sqrt()))
    return Recipe(kind="unit" if unit and name in ("q", "k") else "normal", size=size)


def _plain(size: float) -> float:
    """Two digits: what is drawn by a recipe then has the same recipe, as a rule."""
    return float(f"{size:.2g}")


def unit_vectors(shape: torch.Size, kind: str) -> Tensor:
    """[T, H, K] rows e_0, or e_(t mod K)."""
    found = torch.zeros(shape)
    rows = torch.arange(shape[0])
    found[rows, :, rows % shape[-1] if kind == "turn" else 0] = 1.0
    return found


def draw(recipe: Recipe, shape: torch.Size, dtype: torch.dtype, dice: torch.Generator) -> Tensor:
    """A tensor of a recipe; the script draws in the same words."""
    if recipe.kind == "full":
        return torch.full(shape, recipe.size, dtype=dtype)
    if recipe.kind in ("first", "turn"):
        return unit_vectors(shape, recipe.kind).to(dtype)
    if recipe.kind == "uniform":
        return (torch.rand(shape, generator=dice) * recipe.size).to(dtype)
    x = torch.randn(shape, generator=dice)
    if recipe.kind == "unit":
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / length).to(dtype)
    return (x * recipe.size).to(dtype)


def recipes_of(case: Case) -> dict[str, Recipe]:
    """Tensor -> recipe, in the order in which they are drawn."""
    unit = case.options.qk == "normalised"
    return {name: recipe_of(name, case[name], unit) for name in DRAWN if case.get(name) is not None}


def seeded_case(case: Case, recipes: dict[str, Recipe], seed: int) -> Case:
    """The case with every valued tensor made by its recipe."""
    dice = torch.Generator().manual_seed(seed)
    own = rule_only(case) if case.get("pool") is not None else case
    made = {n: draw(r, own[n].shape, own[n].dtype, dice) for n, r in recipes.items()}
    changed = own.with_tensors(**made)
    return msgspec.structs.replace(changed, origin=Origin(kind="derived", seed=seed, note=NOTE))


def is_of(case: Case, recipes: dict[str, Recipe], seed: int) -> bool:
    """Whether a case is what the recipes give for a seed, bit for bit."""
    made = seeded_case(case, recipes, seed)
    return all(torch.equal(made[name], case[name]) for name in recipes)


def find_seed(case: Case, fails: Callable[[Case], bool]) -> Iterator[tuple[int, Case]]:
    """The first seed on which the failure is the same, if one of the first few is."""
    recipes = recipes_of(case)
    for seed in range(SEEDS):
        made = seeded_case(case, recipes, seed)
        if fails(made):
            yield seed, made
            return
