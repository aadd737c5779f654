"""The captures directory: calls in order, and a missing layer is explained by what the model is."""

from __future__ import annotations

import msgspec
import pytest
from gdncheck.capture.casefile import write_case
from gdncheck.capture.directory import cases_of_layer, file_name, layers_in, ranges
from gdncheck.capture.errors import BadInput, CannotRun
from gdncheck.capture.make import make

TYPES = ["full_attention" if (n + 1) % 4 == 0 else "linear_attention" for n in range(20)]


def fill(directory, layers, config=None):
    case = make("qwen", lengths=[2], k_heads=1, v_heads=1, dims=(2, 2))
    case = msgspec.structs.replace(case, model_config=config or {})
    for layer, call in layers:
        write_case(case, directory / file_name(layer, call))


def test_calls_come_in_call_order_and_other_files_are_left_out(tmp_path):
    fill(tmp_path, [(17, 10), (17, 2), (17, 0), (18, 0)])
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".layer017.call0003.safetensors.part").write_text("half")
    assert [p.name for p in cases_of_layer(tmp_path, 17)] == [file_name(17, n) for n in (0, 2, 10)]
    assert layers_in(tmp_path) == [17, 18]


@pytest.mark.parametrize("config", [{"layer_types": TYPES}, {"text_config": {"layer_types": TYPES}}])
def test_full_attention_layer_names_the_gdn_layers_nearby(tmp_path, config):
    fill(tmp_path, [(17, 0), (18, 0)], config)
    with pytest.raises(BadInput) as caught:
        cases_of_layer(tmp_path, 19)
    text = "layer 19 is full attention; GDN layers here are 0-2, 4-6, 8-10, 12-14, 16-18 (try --layer 18)"
    assert str(caught.value) == text


def test_gdn_layer_that_was_not_captured_names_those_that_were(tmp_path):
    fill(tmp_path, [(16, 0), (17, 0)], {"layer_types": TYPES})
    with pytest.raises(CannotRun, match=r"layer 5 is not in .*captured are 16-17 \(try --layer 16"):
        cases_of_layer(tmp_path, 5)


def test_layer_beyond_the_model_is_said_to_be_so(tmp_path):
    fill(tmp_path, [(17, 0)], {"layer_types": TYPES})
    with pytest.raises(BadInput, match="layer 99 does not exist, the model has 20"):
        cases_of_layer(tmp_path, 99)


def test_without_layer_types_a_missing_layer_is_only_missing(tmp_path):
    fill(tmp_path, [(3, 0)])
    (tmp_path / file_name(1, 0)).write_bytes(b"damaged")
    with pytest.raises(CannotRun, match="captured are 1, 3"):
        cases_of_layer(tmp_path, 2)


def test_no_directory_empty_directory_and_a_file_are_told_apart(tmp_path):
    with pytest.raises(CannotRun, match="no such directory"):
        layers_in(tmp_path / "absent")
    with pytest.raises(CannotRun, match="holds no captures"):
        cases_of_layer(tmp_path, 17)
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="is a file"):
        layers_in(tmp_path / "file")


def test_one_call_in_two_files_is_refused(tmp_path):
    fill(tmp_path, [(17, 0)])
    (tmp_path / "layer17.call0.safetensors").write_bytes(b"x")
    with pytest.raises(BadInput, match="keep one"):
        cases_of_layer(tmp_path, 17)


def test_ranges_are_short():
    assert ranges([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"
    assert ranges([]) == ""
