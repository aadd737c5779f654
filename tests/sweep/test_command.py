"""`gdncheck sweep` as typed: what is printed, the JSON contract, and one line for wrong input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from gdncheck.capture.casefile import write_case

from gdncheck.cli import main

PLACE = {"tensor", "class", "sequence", "head", "chunk", "token"}


@pytest.fixture
def typed(monkeypatch, capsys):
    """typed('sweep', ...) -> (exit status, stdout, stderr)."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def run(*words):
        with pytest.raises(SystemExit) as end:
            main(list(map(str, words)))
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return run


@pytest.fixture
def case_file(tmp_path, small_case):
    return write_case(small_case(), tmp_path / "case.safetensors")


def test_json_lacks_what_scripts_rely_on(typed, case_file):
    words = ("--kernel", "planted:state_bf16", "--device", "cpu", "--only", "state_dtype", "--json")
    status, out, _ = typed("sweep", case_file, *words)
    found = json.loads(out)
    assert status == 1
    assert found["schema"] == 1
    assert found["first_wrong"] is None
    assert found["tried"] == len(found["results"]) == 3
    first = found["first_nonfinite"]
    assert set(first) >= {"config", "deviations", "place"}
    assert first["deviations"] == {"state_dtype": "bfloat16"}
    assert set(first["place"]) == PLACE
    assert set(found["baseline"]) == set(first["config"])
    assert found["command"].startswith(f"gdncheck sweep {case_file}")


def test_the_report_is_wider_than_a_terminal_or_leaves_the_answer_out(typed, case_file, tmp_path):
    words = ("--kernel", "planted:pin_of_64", "--device", "cpu", "--only", "autotune,state_dtype")
    status, out, _ = typed("sweep", case_file, *words, "--out", tmp_path / "run")
    lines = out.splitlines()
    assert status == 1
    assert all(len(line) <= 100 for line in lines[:-1])  # the last one repeats the command, however long
    matrix = next(line for line in lines if line.startswith("autotune"))
    assert re.search(r"\[tuner\] ok .*BK=32 ok .*BK=64 FAIL .*BK=128 ok", matrix)
    assert (
        "first wrong: autotune=toy_kernel:BK=64: output wrong at sequence 0, head 1, chunk 0, token 5" in out
    )
    assert "nearest that passes: the same with autotune=tuner (confirmed)" in out
    assert "work-around: autotune=tuner / autotune=toy_kernel:BK=32" in out
    assert "not asked for: chunk_size" in " ".join(out.split())
    assert lines[-1].startswith("fail in ")
    assert {p.name for p in (tmp_path / "run").iterdir()} >= {"report.json", "report.txt", "run.sqlite"}


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--axis", "split"], 2, "has no value"),
        (["--axis", "split=at-0"], 2, "is no value of split"),
        (["--only", "splitt"], 2, "is no axis"),
        (["--budget", "soon"], 2, "is no time"),
        (["--budget", "0m"], 2, "is no time"),
        (["--depth", "3"], 2, "is not one of"),
        (["--baseline", "vllm-9"], 2, "shipped are hf"),
        (["--resume"], 2, "add --out DIR"),
        (["--layer", "3"], 2, "not both"),
        (["--kernel", "nobody.chunk"], 2, "unknown kernel"),
    ],
)
def test_a_wrong_word_is_no_one_line_error(words, status, message, typed, case_file):
    code, out, err = typed("sweep", case_file, "--device", "cpu", *words)
    assert (code, out) == (status, "")
    assert message in err
    assert "Traceback" not in err


def test_nothing_to_sweep_is_named(typed):
    code, _, err = typed("sweep")
    assert code == 2
    assert "--layer N" in err


def test_bad_input_is_blamed_on_a_configuration(typed, tmp_path, small_case):
    case = small_case()
    v = case["v"].clone()
    v[3] = float("nan")
    path = write_case(case.with_tensors(v=v), tmp_path / "bad.safetensors")
    status, out, _ = typed("sweep", path, "--kernel", "planted:sound", "--device", "cpu")
    assert status == 1
    assert "the input is bad" in out
    assert "nothing else was tried" in " ".join(out.split())
    assert out.splitlines()[-1].startswith("out-of-contract in ")


def test_a_budget_that_is_used_up_goes_unsaid(typed, case_file):
    words = ("--kernel", "planted:sound", "--device", "cpu", "--only", "state", "--budget", "0.01s")
    status, out, _ = typed("sweep", case_file, *words)
    assert status == 0
    assert re.search(r"\d+ configurations that the budget did not reach", out)
    assert "not run" in out
