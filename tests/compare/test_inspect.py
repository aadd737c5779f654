"""inspect and the difference of two cases: what they say is what the tensors hold."""

from __future__ import annotations

import msgspec
import pytest
import torch
from gdncheck.capture.case import CallOptions
from gdncheck.capture.casefile import read_case, write_case
from gdncheck.capture.make import FAMILIES, make
from gdncheck.compare.casediff import casediff
from gdncheck.compare.inspect import inspect, neighbour_cosines

SMALL = {"lengths": [40, 0, 1, 20], "dims": (16, 8), "state": "random", "seed": 2}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_is_inspected_and_only_forgotten_l2norm_is_unsound(family):
    report = inspect(make(family, **SMALL))
    assert report.sound == (family != "forgotten-l2norm")
    assert report.tokens == 61
    assert {row.name for row in report.tensors} >= {"q", "k", "v", "g", "beta", "cu_seqlens", "initial_state"}
    for quantiles in report.statistics.values():
        values = list(quantiles.values())
        assert values == sorted(values)


def test_sizes_shapes_and_counts_are_those_of_the_file(tmp_path):
    case = make("qwen", **SMALL)
    v = case["v"].clone()
    v[45, 1, :3] = float("nan")
    path = write_case(case.with_tensors(v=v), tmp_path / "c.safetensors")
    report = inspect(read_case(path))
    assert report.bytes == path.stat().st_size
    row = next(r for r in report.tensors if r.name == "v")
    assert (row.dtype, row.shape, row.bytes, row.nonfinite) == ("bfloat16", [61, 4, 8], 61 * 4 * 8 * 2, 3)
    assert not report.sound
    first = report.findings[0]
    assert (first["severity"], first["tensor"], first["sequence"], first["token"]) == ("bad-input", "v", 3, 4)


def test_statistics_are_of_the_inputs_themselves():
    case = make("identical-keys", **SMALL)
    statistics = inspect(case).statistics
    assert statistics["key_cosine"]["0%"] == pytest.approx(1.0)
    assert set(statistics["beta"].values()) == {1.0}
    assert set(statistics["decay"].values()) == {1.0}
    assert statistics["g"]["100%"] == float(case["g"].max())
    assert "state_norm" not in inspect(make("qwen", **{**SMALL, "state": "none"})).statistics


def test_neighbours_across_a_boundary_are_no_neighbours():
    k = torch.eye(4).repeat_interleave(2, dim=0).unsqueeze(1)
    assert neighbour_cosines(k, torch.tensor([0, 2, 2, 4, 6, 8])).flatten().tolist() == [1.0] * 4
    assert len(neighbour_cosines(k[:0], torch.tensor([0, 0]))) == 0


def test_case_without_tokens_is_inspected():
    report = inspect(make("qwen", lengths=[0], state="random"))
    assert report.sound
    assert "g" not in report.statistics


def test_predicted_overflow_is_told_with_its_chunk_size():
    assert inspect(make("tiny-decay", **SMALL)).overflow["chunk_size"] == 16
    assert inspect(make("no-decay", **SMALL)).overflow["chunk_size"] is None


def test_linear_gates_are_inspected_in_their_own_space():
    case = make("qwen", **SMALL)
    options = CallOptions(gate_space="linear")
    linear = msgspec.structs.replace(case.with_tensors(g=case["g"].exp()), options=options)
    assert inspect(linear).sound
    wrong = msgspec.structs.replace(case, options=options)
    assert inspect(wrong).findings[0]["kind"] == "gate-space"


def test_case_does_not_differ_from_itself_even_with_nan():
    case = make("minus-inf", **SMALL)
    case = case.with_tensors(observed_output=torch.full_like(case["v"], float("nan")))
    difference = casediff(case, case)
    assert difference.same
    assert {t.status for t in difference.tensors} == {"equal"}
    assert difference.header == {}


def test_each_kind_of_difference_is_named():
    first = make("qwen", **SMALL)
    v = first["v"].clone()
    v[50, 2, 3] += 1
    second = first.with_tensors(
        v=v, beta=first["beta"].float(), q=first["q"][:, :, :4], z=first["v"], initial_state=None
    )
    second = msgspec.structs.replace(second, options=CallOptions(scale=0.5))
    difference = casediff(first, second)
    by_name = {t.name: t for t in difference.tensors}
    assert not difference.same
    found = by_name["v"]
    assert (found.status, found.n_different, found.sequence, found.token) == ("differs", 1, 3, 9)
    assert found.index == [50, 2, 3]
    assert found.max_abs == pytest.approx(abs(float(v[50, 2, 3]) - float(first["v"][50, 2, 3])))
    statuses = {name: t.status for name, t in by_name.items()}
    assert statuses["beta"] == "dtype"
    assert statuses["q"] == "shape"
    assert statuses["z"] == "only-in-second"
    assert statuses["initial_state"] == "only-in-first"
    assert statuses["k"] == "equal"
    assert difference.header["options.scale"] == (None, 0.5)


def test_nan_against_a_number_differs_without_a_size():
    first = make("qwen", **SMALL)
    v = torch.full_like(first["v"], float("nan"))
    found = next(t for t in casediff(first, first.with_tensors(v=v)).tensors if t.name == "v")
    assert (found.status, found.max_abs, found.token) == ("differs", None, 0)


def test_options_alone_make_cases_differ_but_provenance_does_not():
    case = make("qwen", **SMALL)
    assert not casediff(case, msgspec.structs.replace(case, options=CallOptions(qk="raw"))).same
    origin = msgspec.structs.replace(case.origin, note="again")
    moved = casediff(case, msgspec.structs.replace(case, origin=origin))
    assert moved.same
    assert moved.header == {"origin.note": (None, "again")}
