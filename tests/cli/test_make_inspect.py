"""`make`, `inspect` and `diff A B` as commands: files, JSON, exit statuses, one line for bad input."""

from __future__ import annotations

import json

import pytest
from gdncheck.capture.casefile import read_case
from gdncheck.capture.make import FAMILIES
from gdncheck.capture.make import make as make_case

from gdncheck.cli import main


@pytest.fixture
def run(capsys):
    """Run the command line; gives (exit status, stdout, stderr)."""

    def call(*argv: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(word) for word in argv])
        out = capsys.readouterr()
        return caught.value.code or 0, out.out, out.err

    return call


def test_make_writes_the_case_that_the_library_makes(run, tmp_path):
    path = tmp_path / "case.safetensors"
    options = [
        "--lengths",
        "40,0,1",
        "--k-heads",
        "1",
        "--v-heads",
        "3",
        "--dims",
        "16,8",
        "--dtype",
        "fp16",
        "--beta-dtype",
        "fp32",
        "--seed",
        "9",
    ]
    status, out, err = run("make", "exact", "-o", path, *options, "--state", "random,none,stale")
    assert (status, err) == (0, "")
    assert str(path) in out
    assert "41 tokens in 3 sequences" in out
    twin = make_case(
        "exact", lengths=[40, 0, 1], k_heads=1, v_heads=3, dims=(16, 8), dtype="fp16", beta_dtype="fp32",
        seed=9, state="random,none,stale",
    )  # fmt: skip
    assert read_case(path).content_hash == twin.content_hash


def test_make_json_names_file_and_hash(run, tmp_path):
    path = tmp_path / "case.safetensors"
    status, out, _ = run("make", "qwen", "-o", path, "--json")
    assert status == 0
    assert json.loads(out) == {"schema": 1, "path": str(path), "content_hash": read_case(path).content_hash}


def test_make_lists_every_family_with_its_distribution(run):
    status, out, _ = run("make", "--list")
    assert status == 0
    for name, family in FAMILIES.items():
        assert f"{name}: {family.summary}" in out
        assert family.gate in out


@pytest.mark.parametrize(
    "argv",
    [
        ["quen"],
        ["qwen", "--lengths", "4,x"],
        ["qwen", "--lengths", ""],
        ["qwen", "--lengths", "-3"],
        ["qwen", "--v-heads", "3"],
        ["qwen", "--k-heads", "0"],
        ["qwen", "--dims", "64"],
        ["qwen", "--dtype", "fp8"],
        ["qwen", "--state", "warm"],
        ["qwen", "--seed", "-1"],
        [],
    ],
)
def test_make_with_bad_arguments_exits_2_and_writes_nothing(run, tmp_path, argv):
    status, out, err = run("make", *argv, "-o", tmp_path / "case.safetensors")
    assert status == 2
    assert out == ""
    assert err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_make_into_a_directory_exits_2(run, tmp_path):
    status, _, err = run("make", "qwen", "-o", tmp_path)
    assert status == 2
    assert len(err.splitlines()) == 1


def test_inspect_says_sound_and_json_has_the_same_numbers(run, tmp_path):
    path = tmp_path / "case.safetensors"
    run("make", "no-decay", "-o", path, "--state", "random")
    status, out, err = run("inspect", path)
    assert (status, err) == (0, "")
    assert out.splitlines()[-1].startswith("input sound in")
    assert out.splitlines()[-1].endswith(f"gdncheck inspect {path}")
    status, out, _ = run("inspect", path, "--json")
    document = json.loads(out)
    assert (status, document["schema"], document["sound"], document["findings"]) == (0, 1, True, [])
    assert {row["name"]: row["shape"] for row in document["tensors"]}["initial_state"] == [3, 4, 64, 64]


def test_inspect_names_bad_input_and_keeps_json_free_of_nan(run, tmp_path):
    path = tmp_path / "case.safetensors"
    run("make", "minus-inf", "-o", path)
    status, out, _ = run("inspect", path, "--json")
    assert status == 0
    finding = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))["findings"][0]
    assert (finding["kind"], finding["value"]) == ("gate-inf", "-inf")
    run("make", "forgotten-l2norm", "-o", path)
    status, out, _ = run("inspect", path)
    assert status == 0
    assert "outside: k is" in out
    assert out.splitlines()[-1].startswith("input not sound")


@pytest.mark.parametrize("content", [None, b"", b"junk", b"\x10\0\0\0\0\0\0\0{"])
def test_inspect_of_no_case_file_exits_2_in_one_line(run, tmp_path, content):
    path = tmp_path / "case.safetensors"
    if content is not None:
        path.write_bytes(content)
    status, out, err = run("inspect", path)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert str(path) in err


def test_diff_of_two_cases_exits_0_if_same_and_1_if_not(run, tmp_path):
    one, two = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    run("make", "qwen", "-o", one, "--seed", 1)
    run("make", "qwen", "-o", two, "--seed", 2)
    assert run("diff", one, one)[0] == 0
    status, out, _ = run("diff", one, two)
    assert status == 1
    assert "first at token 0 of sequence 0" in out
    assert out.splitlines()[-1].endswith(f"gdncheck diff {one} {two}")
    status, out, _ = run("diff", one, two, "--json")
    document = json.loads(out)
    assert (status, document["schema"], document["same"]) == (1, 1, False)
