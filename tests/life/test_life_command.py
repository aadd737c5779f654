"""`gdncheck life`: exit statuses, one JSON document, files that can be run again, messages of one line."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from gdncheck.capture.errors import BadInput
from gdncheck.compare.life.steps import read_history

from gdncheck.cli import cli


@pytest.fixture
def run():
    def call(*words):
        return CliRunner().invoke(cli, ["life", *words], standalone_mode=False, prog_name="gdncheck")

    return call


def test_the_last_line_cannot_be_run_again(run):
    output = run("--steps", "10", "--seed", "3").stdout
    assert output.splitlines()[-1].startswith("pass in ")
    assert output.splitlines()[-1].endswith("again: gdncheck life --steps 10 --seed 3")


def test_json_is_more_than_one_document_or_lacks_the_history(run):
    result = run("--bookkeeper", "planted:padded-row-writes", "--seed", "4", "--json")
    found = json.loads(result.stdout)
    (one,) = found["results"]
    assert (found["schema"], found["verdict"], one["verdict"]) == (1, "fail", "fail")
    assert one["failure"]["rule"] == "unowned"
    assert result.return_value == 1
    assert len(one["history"]["steps"]) <= 6
    assert one["found_in"] == "random 4/0"


def test_a_written_history_does_not_fail_again(run, tmp_path):
    run("--bookkeeper", "planted:conv-in-place", "--seed", "4", "--out", str(tmp_path))
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"report.json", "report.txt", "reference.history.json"}
    path = tmp_path / "reference.history.json"
    assert len(read_history(path).steps) <= 6
    again = run("--history", str(path), "--bookkeeper", "planted:conv-in-place")
    assert again.return_value == 1
    line = json.loads((tmp_path / "report.json").read_text())["results"][0]["reason"]
    assert line in again.stdout
    assert run("--history", str(path)).return_value == 0


@pytest.mark.parametrize("name", ["slot-reuse", "padded"])
def test_a_named_history_is_no_history(run, name):
    result = run("--history", name)
    assert result.return_value == 0
    assert "every step" in result.stdout


@pytest.mark.parametrize(
    "words", [("--history", "nowhere.json"), ("--bookkeeper", "planted:x"), ("--slots", "6")]
)
def test_a_wrong_argument_ends_in_a_traceback(run, words):
    result = run(*words)
    assert isinstance(result.exception, BadInput)
    assert "\n" not in str(result.exception)


def test_wrong_dims_are_taken(run):
    assert "64,64" in str(run("--dims", "64").exception)
