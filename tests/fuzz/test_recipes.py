"""Recipes: the same case for the same number, inside the domain, where kernels turn."""

from __future__ import annotations

import pytest
import torch
from gdncheck.capture.casefile import hash_of
from gdncheck.capture.errors import BadInput
from gdncheck.capture.make import make
from gdncheck.compare.fuzz.build import build
from gdncheck.compare.fuzz.deviations import Axes
from gdncheck.compare.fuzz.dice import Dice
from gdncheck.compare.fuzz.generators.generator import CorpusEntry, Limits, Surroundings
from gdncheck.compare.fuzz.generators.table import GENERATORS, draw_recipe
from gdncheck.compare.fuzz.recipe import Piece, Recipe, Twist, from_json, to_json
from gdncheck.compare.fuzz.stock import Stockroom, capture_shape, families_for, shape_of, usable_captures
from gdncheck.compare.fuzz.twists import EDGES, TWISTS, apply_twist
from gdncheck.compare.soundness import soundness_of
from gdncheck.compare.witness import Witness

SHAPE = shape_of("1x2x16x16:bf16")
FAMILIES = tuple(f for f, why in families_for(lambda clause, default=None: default).items() if not why)


def surroundings(number, *, corpus=(), stock=None, **limits):
    given = {"max_tokens": 130, "families": FAMILIES, **limits}
    return Surroundings(
        stock=stock or Stockroom(3, [SHAPE], 130), limits=Limits(**given), corpus=corpus,
        deviations=Axes({}).draw, number=number,
    )  # fmt: skip


def recipes(count, **options):
    stock = options.pop("stock", None) or Stockroom(3, [SHAPE], 130)
    numbers = [n * 37 % 2048 for n in range(count)]
    return [draw_recipe(Dice(3, n), surroundings(n, stock=stock, **options)) for n in numbers], stock


def test_a_number_gives_another_case_in_another_process_or_order():
    first, stock = recipes(12)
    again, other = recipes(12)
    assert first == again
    assert [hash_of(build(r, stock)) for r in first] == [hash_of(build(r, other)) for r in reversed(again)][
        ::-1
    ]


def test_a_recipe_read_from_the_store_makes_another_case():
    drawn, _ = recipes(20)
    for recipe in drawn:
        assert from_json(to_json(recipe)) == recipe
        assert len(to_json(recipe)) < 1500


def test_a_drawn_case_is_out_of_contract():
    drawn, stock = recipes(60)
    for recipe in drawn:
        case = build(recipe, stock)
        found = soundness_of(Witness(case))
        assert found.sound, (recipe, found.reason)
        assert case.n_tokens <= 130
        assert all(bool(torch.isfinite(t).all()) for t in case.tensors.values())


@pytest.mark.parametrize("name", TWISTS)
def test_a_twist_leaves_the_domain_or_changes_nothing(name):
    changed = 0
    for at in EDGES:
        case = make("qwen", lengths=[70, 5], k_heads=1, v_heads=2, dims=(16, 16), state="random", seed=4)
        size = TWISTS[name].size(Dice(name, at))
        tensors = {n: t.clone() for n, t in case.tensors.items()}
        apply_twist(Twist(name, 0, -1, at, size), tensors, [0, 70, 75])
        changed += any(not torch.equal(tensors[n], case[n]) for n in case.tensors)
        found = soundness_of(Witness(case.with_tensors(**tensors)))
        assert found.sound, (name, at, found.reason)
        assert torch.equal(tensors["v"][70:], case["v"][70:]) or name == "scale-state"
    assert changed


def test_lengths_do_not_gather_where_chunk_kernels_turn():
    drawn, _ = recipes(400)
    lengths = [n for recipe in drawn for n in recipe.lengths if n]
    near = [n for n in lengths if n % 64 in (0, 1, 63)]
    assert len(near) > 0.3 * len(lengths)
    assert {n % 64 for n in near} == {0, 1, 63}
    assert any(n % 16 == 15 for n in lengths)
    assert {1, 2, 3, 4} <= set(lengths)
    assert any(len(recipe.pieces) > 3 for recipe in drawn)


@pytest.mark.parametrize("empties", ["none", "end", "anywhere"])
def test_an_empty_sequence_stands_where_the_contract_has_none(empties):
    corpus = [CorpusEntry(number=0, recipe=_with_empty(), reason="")]
    drawn, _ = recipes(300, empties=empties, corpus=corpus)
    inside, seen = 0, 0
    for recipe in drawn:
        lengths = recipe.lengths
        seen += 0 in lengths
        full = [i for i, n in enumerate(lengths) if n]
        inside += any(n == 0 and i < max(full) for i, n in enumerate(lengths))
    assert bool(seen) == (empties != "none")
    assert bool(inside) == (empties == "anywhere")


def _with_empty():
    pieces = (Piece("qwen", 0, 0, 0, "fresh"), Piece("qwen", 0, 3, 17, "random"))
    return Recipe(shape=0, pieces=pieces, made_by="fresh")


def test_every_generator_is_asked():
    entries = [CorpusEntry(number=0, recipe=_with_empty(), reason="")]
    capture = make("qwen", lengths=[50, 9], k_heads=1, v_heads=2, dims=(16, 16), state="random", seed=9)
    captures, left = usable_captures([capture], 4)
    assert not left
    stock = Stockroom(3, [SHAPE], 130, captures)
    drawn, _ = recipes(120, corpus=entries, stock=stock)
    assert {recipe.made_by for recipe in drawn} == set(GENERATORS)
    assert any(recipe.parent == 0 for recipe in drawn if recipe.made_by == "mutated")


def test_a_capture_is_not_cut_from_or_its_heads_are_mixed_up():
    capture = make("qwen", lengths=[50, 9], k_heads=2, v_heads=8, dims=(16, 16), state="random", seed=9)
    (kept,), _ = usable_captures([capture], 4)
    shape = capture_shape(kept)
    assert (shape.k_heads, shape.v_heads) == (1, 4)
    stock = Stockroom(3, [shape], 130, [kept])
    recipe = Recipe(
        shape=0, pieces=(Piece("capture.0", 0, 11, 20, "random"), Piece("capture.0", 0, 55, 9, "fresh"))
    )
    case = build(recipe, stock)
    assert torch.equal(case["v"][:20], capture["v"][11:31, :4])
    assert torch.equal(case["q"][:20], capture["q"][11:31, :1])
    # A window that is longer than the capture starts over.
    assert torch.equal(case["k"][20:], capture["k"][[55, 56, 57, 58, 0, 1, 2, 3, 4]][:, :1])
    assert torch.equal(case["initial_state"][0], capture["initial_state"][0, :4])
    assert case["has_initial_state"].tolist() == [True, False]


def test_a_capture_that_is_bad_by_itself_is_cut_up():
    bad = make("forgotten-l2norm", lengths=[20], k_heads=1, v_heads=2, dims=(16, 16), seed=1)
    kept, (words,) = usable_captures([bad], 4)
    assert not kept
    assert "domain" in words


@pytest.mark.parametrize("word", ["2x3x16x16", "2x4x16", "axbxcxd", "2x4x16x16:int8", "2x4x16x16:bf16:fp99"])
def test_a_shape_that_is_none_is_taken(word):
    with pytest.raises(BadInput, match="--shape"):
        shape_of(word)
    assert shape_of("2x4x16x8:bf16:beta=fp32").word == "2x4x16x8:bf16:beta=fp32"
