"""Layers, sizes and refusals follow from config.json alone, for every form it is found in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gdncheck.capture.checkpoint import (
    expected_bytes,
    find_checkpoint,
    model_shape,
    ranges,
    select_layers,
)
from gdncheck.capture.errors import BadInput, CannotRun
from gdncheck.capture.plan import check_room, describe, make_plan, size
from hypothesis import given
from hypothesis import strategies as st

QWEN_35B = {
    "model_type": "qwen3_5_moe",
    "text_config": {"model_type": "qwen3_5_moe_text", "dtype": "bfloat16"},
}


def checkpoint(tmp_path: Path, config: Any) -> Path:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return tmp_path


def test_35b_config_that_leaves_out_defaults_has_30_gdn_layers(tmp_path: Path) -> None:
    shape = model_shape(checkpoint(tmp_path, QWEN_35B))
    assert len(shape.gdn_layers) == 30
    assert 17 in shape.gdn_layers
    assert 3 not in shape.gdn_layers
    assert (shape.n_key_heads, shape.n_value_heads, shape.key_dim, shape.conv_channels) == (16, 32, 128, 8192)


@pytest.mark.parametrize(
    ("config", "gdn"),
    [
        ({"model_type": "qwen3_next", "num_hidden_layers": 6, "full_attention_interval": 2}, (0, 2, 4)),
        ({"model_type": "qwen3_5_text", "layer_types": ["full_attention", "linear_attention"]}, (1,)),
        (
            {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "num_hidden_layers": 4}},
            (0, 1, 2),
        ),
    ],
)
def test_layer_types_are_read_or_derived(tmp_path: Path, config: Any, gdn: tuple[int, ...]) -> None:
    assert model_shape(checkpoint(tmp_path, config)).gdn_layers == gdn


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"model_type": "llama"}, "model type llama has no Gated DeltaNet layers"),
        (
            {"model_type": "qwen3_next", "layer_types": ["full_attention"] * 3},
            "all 3 layers are full attention",
        ),
        ("{", "cannot be read as JSON"),
        ("[]", "holds a list"),
    ],
)
def test_config_without_gdn_layers_is_refused_in_one_line(
    tmp_path: Path, config: Any, complaint: str
) -> None:
    with pytest.raises(BadInput, match=complaint) as error:
        model_shape(checkpoint(tmp_path, config))
    assert "\n" not in str(error.value)


def test_missing_checkpoint_says_what_to_give(tmp_path: Path) -> None:
    for name in (tmp_path / "absent", "owner/name-that-nobody-has", "not a name at all"):
        with pytest.raises(BadInput, match="no such directory"):
            find_checkpoint(name)
    with pytest.raises(BadInput, match=r"has no config\.json"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("wanted", "layers"),
    [
        ("17", [17]), (17, [17]), ("0-4", [0, 1, 2, 4]), ("0,17", [0, 17]),
        (["17", "0-2", "1"], [0, 1, 2, 17]), ([5, 4], [4, 5]), ("36-38", [36, 37, 38]),
    ],
)  # fmt: skip
def test_layers_asked_for_in_any_form_come_sorted(tmp_path: Path, wanted: Any, layers: list[int]) -> None:
    assert select_layers(model_shape(checkpoint(tmp_path, QWEN_35B)), wanted) == layers


def test_all_is_every_gdn_layer(tmp_path: Path) -> None:
    shape = model_shape(checkpoint(tmp_path, QWEN_35B))
    assert tuple(select_layers(shape, "all")) == shape.gdn_layers


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ("19", "layer 19 is full attention; GDN layers here are 0-2, 4-6"),
        ("19", "try --layer 18"),
        ("3-3", "layer 3 is full attention"),
        ("40", r"layer 40 is out of range: the model has 40 layers \(0..39\)"),
        ("0-99", "layer 99 is out of range"),
        ("5-2", "is empty"),
        ("-1", "is no layer"),
        ("x", "is no layer"),
        ("1-", "is no layer|full attention"),
        ("", "is no layer"),
        ([], "no layer asked for"),
    ],
)
def test_layer_that_cannot_be_captured_is_refused_in_one_line(
    tmp_path: Path, wanted: Any, complaint: str
) -> None:
    with pytest.raises(BadInput, match=complaint) as error:
        select_layers(model_shape(checkpoint(tmp_path, QWEN_35B)), wanted)
    assert "\n" not in str(error.value)


@given(st.sets(st.integers(0, 60), min_size=1))
def test_ranges_name_exactly_the_layers(layers: set[int]) -> None:
    named: list[int] = []
    for part in ranges(tuple(sorted(layers))).split(", "):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(layers)


def test_35b_layer_at_11686_tokens_takes_what_the_manual_says(tmp_path: Path) -> None:
    shape = model_shape(checkpoint(tmp_path, QWEN_35B))
    assert 0.28e9 < expected_bytes(shape, [11686], "rule") < 0.31e9
    assert 0.6e9 < expected_bytes(shape, [11686], "core") < 0.75e9
    assert (
        expected_bytes(shape, [11686], "rule", "float32") > 1.9 * expected_bytes(shape, [11686], "rule") - 1e7
    )


def test_disk_that_is_too_small_is_refused_before_anything_runs(tmp_path: Path) -> None:
    shape = model_shape(checkpoint(tmp_path, QWEN_35B))
    small = make_plan(shape, 10, [17], "rule", split=None, decode=0)
    check_room(small, tmp_path / "not" / "yet" / "there")
    huge = make_plan(shape, 10**12, [17], "rule", split=None, decode=0)
    with pytest.raises(CannotRun, match=r"the capture needs .* are free"):
        check_room(huge, tmp_path)


def test_plan_is_told_in_one_line(tmp_path: Path) -> None:
    shape = model_shape(checkpoint(tmp_path, QWEN_35B))
    plan = make_plan(shape, 200, [17, 18], "core", split=[64, 65], decode=2)
    assert plan.lengths == [64, 65, 71]
    text = describe(plan, Path("captures"))
    assert text.startswith("200 tokens in 3 calls and 2 decode steps, 2 layers, core: 10 files, ")
    assert size(plan.bytes) in text


@pytest.mark.parametrize(
    ("n_bytes", "words"), [(12, "12 B"), (1200, "1.2 kB"), (1_300_000, "1.3 MB"), (620_000_000, "0.62 GB")]
)
def test_sizes_are_written_as_disks_are_sold(n_bytes: int, words: str) -> None:
    assert size(n_bytes) == words
