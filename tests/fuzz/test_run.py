"""Whole runs: faults found once, honest kernels left alone, stops and merges that lose nothing."""

from __future__ import annotations

import json
import shutil
import sqlite3

import pytest
from gdncheck.capture.case import Case
from gdncheck.capture.casefile import read_case, write_case
from gdncheck.capture.errors import BadInput
from gdncheck.capture.make import make
from gdncheck.compare.fuzz.jsonout import document
from gdncheck.compare.fuzz.merge import merge
from gdncheck.compare.fuzz.summary import lines
from gdncheck.compare.store import FILE_NAME, RunStore

EDGE_AXES = {"split": ["at-63"]}


def rows_of(directory):
    connection = sqlite3.connect(directory / FILE_NAME)
    return {n: (verdict, recipe) for n, verdict, recipe in connection.execute(
        "SELECT number, verdict, recipe FROM cases WHERE kernel = 0"
    )}  # fmt: skip


def test_a_fault_at_a_cut_next_to_a_chunk_is_not_found(fuzz_of, tmp_path):
    """T mod 64 = 1, cut at 63, beta above 0.9: found, kept once, its deviations reduced to the cut."""
    report = fuzz_of("edge", cases=100, axes=EDGE_AXES, only=["split", "memory"], out=tmp_path / "run")
    (row,) = [r for r in report.findings if r.class_ == "wrong"]
    assert row.deviations == {"split": "at-63"}
    assert (row.status, row.stage, row.failures) == ("to-shrink", "output", row.runs)
    assert row.times == report.per_verdict["fail"]
    assert report.exit_status == 1
    case = read_case(tmp_path / "run" / row.case_file)
    assert isinstance(case, Case)
    assert any(n % 64 == 1 for n in case.lengths)
    plain = document(report)
    (found,) = plain["findings"]
    assert {"signature", "kernel", "verdict", "tier", "place", "rate", "case"} <= set(found)
    assert found["place"]["tensor"] == "output"
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert "not covered" in "\n".join(lines(report))


@pytest.mark.slow
def test_a_flake_is_kept_under_many_names(fuzz_of):
    report = fuzz_of("flake", cases=40, families=["exact", "long-memory"], max_tokens=40)
    (row,) = report.findings
    assert row.class_ == "moves"
    assert row.place_pattern == "comes and goes"
    assert 0 < row.failures < row.runs
    assert row.times == report.per_verdict["fail"] > 2


@pytest.mark.parametrize("kernel", ["sound", "emulation.chunk"])
def test_an_honest_kernel_is_accused(fuzz_of, kernel):
    report = fuzz_of(kernel, cases=70)
    assert report.findings == ()
    assert report.per_verdict == {"pass": 70}
    assert report.exit_status == 0
    assert len(report.per_axis) >= 4
    assert report.corpus > 0


@pytest.mark.slow
def test_a_resumed_run_makes_other_cases(fuzz_of, tmp_path):
    """Stopped by Ctrl-C three times, each time with cases in the air: the same cases, verdicts and corpus."""
    options = {"cases": 200, "families": ["exact"], "shapes": ["1x1x8x8:bf16"], "max_tokens": 67}
    whole = fuzz_of("sound", **options, out=tmp_path / "whole")
    seen = [0]

    def stop(event, data):
        seen[0] += event == "case"
        if event == "case" and seen[0] in (20, 71, 140):
            raise KeyboardInterrupt

    for turn in range(4):
        report = fuzz_of("sound", **options, out=tmp_path / "run", resume=turn > 0, progress=stop)
        assert report.stopped == ("interrupted" if turn < 3 else "cases")
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    assert report.cases == whole.cases == 200
    assert report.corpus == whole.corpus > 0
    assert any('"by":"mutated"' in recipe for _, recipe in rows_of(tmp_path / "run").values())


@pytest.mark.slow
def test_two_shards_find_other_things_than_one_run(fuzz_of, tmp_path):
    """One of them stopped half-way and resumed; merged twice."""
    options = {"cases": 96, "axes": EDGE_AXES, "only": ["split"], "families": ["parallel-keys"]}
    whole = fuzz_of("edge", **options, out=tmp_path / "whole")
    seen = [0]

    def stop(event, data):
        seen[0] += event == "case"
        if event == "case" and seen[0] == 20:
            raise KeyboardInterrupt

    fuzz_of("edge", **options, out=tmp_path / "a", shard=(1, 2), progress=stop)
    fuzz_of("edge", **options, out=tmp_path / "a", shard=(1, 2), resume=True)
    half = merge([tmp_path / "a"], out=tmp_path / "joined")
    fuzz_of("edge", **options, out=tmp_path / "b", shard=(2, 2))
    merged = merge([tmp_path / "a", tmp_path / "b"], out=tmp_path / "joined")
    again = merge([tmp_path / "b", tmp_path / "a"], out=tmp_path / "joined")
    assert half.cases == 48
    assert rows_of(tmp_path / "joined") == rows_of(tmp_path / "whole")
    for report in (merged, again):
        assert report.cases == whole.cases == 96
        assert {(r.signature, r.times) for r in report.findings} == {
            (r.signature, r.times) for r in whole.findings
        }
        assert report.per_verdict == whole.per_verdict
    (row,) = merged.findings
    read_case(tmp_path / "joined" / row.case_file)


def test_runs_of_different_things_are_merged(fuzz_of, tmp_path):
    fuzz_of("sound", cases=2, out=tmp_path / "a")
    fuzz_of("sound", cases=2, out=tmp_path / "b", seed=1)
    with pytest.raises(BadInput, match="seed differ"):
        merge([tmp_path / "a", tmp_path / "b"], out=tmp_path / "joined")
    with pytest.raises(BadInput, match="one of the runs"):
        merge([tmp_path / "a"], out=tmp_path / "a")
    RunStore.open(tmp_path / "other", parameters={"what": "sweep"}, resume=False).close()
    with pytest.raises(BadInput, match="joins runs of fuzz"):
        merge([tmp_path / "other"], out=tmp_path / "joined")


def test_a_run_of_another_seed_is_resumed(fuzz_of, tmp_path):
    fuzz_of("sound", cases=2, out=tmp_path / "run")
    with pytest.raises(BadInput, match="seed differ"):
        fuzz_of("sound", cases=4, out=tmp_path / "run", resume=True, seed=1)
    # More cases are no other run.
    assert fuzz_of("sound", cases=4, out=tmp_path / "run", resume=True).cases == 4


def test_captures_are_left_out(fuzz_of, tmp_path):
    for i in range(2):
        case = make("qwen", lengths=[90 + i], k_heads=1, v_heads=2, dims=(16, 16), state="random", seed=i)
        write_case(case, tmp_path / f"captures/layer017.call000{i}.safetensors")
    report = fuzz_of("sound", cases=40, captures=[tmp_path / "captures"], out=tmp_path / "run")
    assert report.per_family.get("capture.0", 0) > 2
    assert report.per_family.get("capture.1", 0) > 2
    shutil.rmtree(tmp_path / "captures")
    with pytest.raises(BadInput, match="no such file"):
        fuzz_of("sound", cases=50, captures=[tmp_path / "captures"], out=tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shard": (3, 2)}, "shard is 3/2"),
        ({"cases": 0}, "cases is 0"),
        ({"axes": {"repeat": ["3"]}}, "axis repeat"),
        ({"only": ["rounding"]}, "say which values"),
        ({"families": ["no-such"]}, "family 'no-such'"),
        ({"families": ["forgotten-l2norm"]}, "no family is left"),
        ({"shapes": ["2x3x4x5"]}, "--shape"),
        ({"resume": True}, "add --out"),
        ({"tune": "often"}, "tune is"),
    ],
)
def test_a_wrong_argument_starts_a_run(fuzz_of, options, words):
    with pytest.raises(BadInput, match=words) as error:
        fuzz_of("sound", **options)
    assert "\n" not in str(error.value)
