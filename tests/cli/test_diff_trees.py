"""`gdncheck diff` on working trees and clones: one changed line is told from its release by one command."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from gdncheck.capture.casefile import write_case
from gdncheck.capture.make import make
from gdncheck.kernels import checkout
from gdncheck.kernels.keep import KEEP

from gdncheck.cli import main

INSTALLED = importlib.metadata.version("fla-core")
FILE = "fla/ops/common/chunk_o.py"
# The first statement lets a token see itself; the second hides it from its own output.
RIGHT, WRONG = "o_t[:, None] >= o_t[None, :]", "o_t[:, None] > o_t[None, :]"


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    path = tmp_path_factory.mktemp("case") / "case.safetensors"
    small = {"lengths": [5, 4], "dims": (16, 16), "k_heads": 1, "v_heads": 1, "state": "random"}
    write_case(make("qwen", **small), path)
    return str(path)


@pytest.fixture
def tree(tmp_path):
    """The files of the installed release that hold its kernels, as somebody's working tree."""
    kept = next(line for line in KEEP if line.family == "fla")
    for file in importlib.metadata.distribution("fla-core").files:
        if kept.holds(str(file)):
            target = tmp_path / "tree" / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.locate(), target)
    return tmp_path / "tree"


@pytest.fixture
def diff(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["diff", *arguments, "--device", "cpu", "--json", "--relations", "none"])
        said = capsys.readouterr()
        document = json.loads(said.out) if said.out else {"message": said.err}
        return ended.value.code, document

    yield run
    checkout.use_sources({})


def change(tree: Path) -> None:
    """In the forward kernel, the first of the file's two that have the statement."""
    source = (tree / FILE).read_text()
    assert RIGHT in source
    (tree / FILE).write_text(source.replace(RIGHT, WRONG, 1))


def test_a_tree_with_one_line_changed_passes_like_its_release(diff, tree, case):
    change(tree)
    names = ["fla.chunk", f"fla.chunk@path:{tree}"]
    status, found = diff(case, *(word for name in names for word in ("--kernel", name)))
    release, changed = found["results"]
    assert (status, release["verdict"], changed["verdict"]) == (1, "pass", "fail")
    assert release["kernel"] == f"fla.chunk@{INSTALLED}"
    assert changed["kernel"] == f"fla.chunk@path:{tree}"
    assert changed["worst_tile"]["tensor"] == "output", "the state never passes that line"


@pytest.mark.slow
def test_two_revisions_of_a_clone_pass_alike(diff, tree, case, tmp_path, monkeypatch):
    monkeypatch.setenv("GDNCHECK_CACHE", str(tmp_path / "cache"))

    def git(*words):
        identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
        subprocess.run(["git", "-C", str(tree), *identity, *words], check=True, capture_output=True)

    git("init", "--quiet", "--initial-branch=main")
    git("add", "-A")
    git("commit", "--quiet", "-m", "as released")
    git("tag", "before")
    change(tree)
    git("commit", "--quiet", "-a", "-m", "a token no longer sees itself")
    names = ["fla.chunk@git:before", "fla.chunk@git:main"]
    kernels = [word for name in names for word in ("--kernel", name)]
    status, found = diff(case, *kernels, "--source", f"fla={tree}")
    assert status == 1
    assert [row["verdict"] for row in found["results"]] == ["pass", "fail"]


BAD = [
    ((), "give --source fla=DIR"),
    (("--source", "fla"), "give FAMILY=DIR"),
    (("--source", "fla=/no/such/clone"), "there is no such directory"),
    (("--source", "fla=a", "--source", "fla=b"), "has a clone already"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_a_clone_that_is_missing_is_told_in_more_than_one_line(diff, case, words, message):
    status, said = diff(case, "--kernel", "fla.chunk@git:main", *words)
    assert status == 2
    assert message in said["message"]
    assert said["message"].count("\n") == 1
