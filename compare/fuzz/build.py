"""From a recipe to a case: cut the pieces, put them behind one another, give states, make the twists.

The idea: the same recipe and stockroom give the same bits, on every machine; nothing is drawn here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...capture.case import CallOptions, Case, Origin
from .recipe import Piece, Recipe
from .stock import Source, Stockroom
from .twists import apply_twist, is_safe

PER_TOKEN = ("q", "k", "v", "g", "beta")


def build(recipe: Recipe, stock: Stockroom) -> Case:
    """The case of a recipe, with its state in float32 where a piece starts from one."""
    sources = [stock.source(recipe.shape, p.source, p.stock) for p in recipe.pieces]
    tensors = {name: torch.cat([_window(s.tokens[name], p) for s, p in _pairs(sources, recipe)])
               for name in PER_TOKEN}  # fmt: skip
    edges = [0]
    for length in recipe.lengths:
        edges.append(edges[-1] + length)
    tensors |= _states(sources, recipe)
    if not is_exact(recipe):
        tensors = _twisted(recipe, tensors, edges)
    tensors["cu_seqlens"] = torch.tensor(edges)
    first = sources[0]
    return Case(
        tensors=tensors,
        options=CallOptions(qk=first.qk, scale=first.scale),
        origin=Origin(kind="synthetic", family="+".join(recipe.families), note="fuzz"),
        finite=not bool(torch.isinf(tensors["g"]).any()),
    )


def is_exact(recipe: Recipe) -> bool:
    """Whether the pieces are of the exact families, whose integers no twist may touch."""
    return all(piece.source.startswith("exact") for piece in recipe.pieces)


def _pairs(sources: list[Source], recipe: Recipe) -> list[tuple[Source, Piece]]:
    return list(zip(sources, recipe.pieces, strict=True))


def _window(tokens: Tensor, piece: Piece) -> Tensor:
    """[length, ...] from `at` on; it starts over where the source ends."""
    if piece.at + piece.length <= tokens.shape[0]:
        return tokens[piece.at : piece.at + piece.length]
    rows = (torch.arange(piece.length) + piece.at) % tokens.shape[0]
    return tokens[rows]


def _states(sources: list[Source], recipe: Recipe) -> dict[str, Tensor]:
    """initial_state and has_initial_state; none where no piece starts from a state."""
    kinds = [piece.start for piece in recipe.pieces]
    if set(kinds) == {"fresh"}:
        return {}
    states = []
    for i, (source, piece) in enumerate(_pairs(sources, recipe)):
        # The states of one case differ: each is turned by another number of columns.
        state = torch.roll(source.state, i, dims=-1) if piece.start == "random" else None
        states.append(torch.zeros_like(source.state) if state is None else state)
    found = {"initial_state": torch.stack(states)}
    if "fresh" in kinds:
        found["has_initial_state"] = torch.tensor([kind != "fresh" for kind in kinds])
    return found


def _twisted(recipe: Recipe, tensors: dict[str, Tensor], edges: list[int]) -> dict[str, Tensor]:
    """The tensors with every twist that leaves them far from overflow."""
    if not edges[-1]:
        return tensors
    for twist in recipe.twists:
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        apply_twist(twist, changed, edges)
        if is_safe(changed):
            tensors = changed
    return tensors
