"""`gdncheck repeat` and `selftest` as commands: numbers, JSON keys, exit statuses, one line for bad input."""

from __future__ import annotations

import json

import pytest
from gdncheck.capture.casefile import write_case
from gdncheck.capture.make import make

from gdncheck.cli import main

KERNEL = "gdncheck.kernels.planted:rule"


@pytest.fixture
def run(capsys):
    """Run the command line; gives (exit status, stdout, stderr)."""

    def call(*argv: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(word) for word in argv])
        out = capsys.readouterr()
        return caught.value.code or 0, out.out, out.err

    return call


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    path = tmp_path_factory.mktemp("repeat") / "case.safetensors"
    write_case(make("qwen", lengths=[20, 7], k_heads=1, v_heads=2, dims=(32, 32), state="random"), path)
    return path


def test_promised_json_keys_are_missing(run, case):
    status, out, err = run(
        "repeat", case, "--kernel", KERNEL, "-n", 3, "--processes", 2, "--device", "cpu", "--json"
    )
    assert (status, err) == (0, "")
    told = json.loads(out)
    promised = {
        "schema", "runs", "failures", "rate", "interval", "confidence", "distinct_outputs", "runs_needed",
    }  # fmt: skip
    assert promised <= set(told)
    assert (told["schema"], told["runs"], told["failures"], told["rate"]) == (1, 6, 0, 0.0)
    assert told["interval"] == pytest.approx([0, 1 - 0.025 ** (1 / 6)])
    assert told["distinct_outputs"] == 1
    assert told["runs_needed"] == {"rate": 0.001, "runs": 2995 - 6}
    (series,) = told["results"]
    assert [p["runs"] for p in series["processes"]] == [3, 3]
    assert [p["first_differs"] for p in series["processes"]] == [False, False]


def test_the_report_for_a_person_lacks_the_command_that_repeats_it(run, case):
    status, out, _ = run("repeat", case, "--kernel", KERNEL, "-n", 2, "--device", "cpu")
    assert status == 0
    assert out.splitlines()[-1].startswith("pass in ")
    assert f"gdncheck repeat {case} --runs 2" in out.splitlines()[-1]
    assert "one-sided" in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "give a case, or --layer"),
        (("x.safetensors", "--layer", 3), "not both"),
        (("x.safetensors", "-n", 0), "0"),
        (("x.safetensors", "--pin", "BK=3"), "KERNEL:NAME=NUMBER"),
        (("x.safetensors", "--kernel", KERNEL), "x.safetensors"),
    ],
)
def test_bad_input_ends_in_a_traceback(run, argv, says):
    status, out, err = run("repeat", *argv)
    assert (status, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_selftest_help_has_no_example(run):
    status, out, _ = run("selftest", "--help")
    assert status == 0
    assert "Example: gdncheck selftest" in out
