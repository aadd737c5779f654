"""`gdncheck capture`: the shipped model end to end, and every refusal in one line with its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gdncheck.capture.casefile import read_case
from gdncheck.capture.run import capture
from gdncheck.capture.tokens import token_hash

from gdncheck.cli import main

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tiny-qwen35moe"
TOKENS = ROOT / "examples" / "tokens200.json"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's threads would fight with whatever else runs here."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return int(end.value.code or 0)


def test_shipped_model_gives_one_file_per_layer_and_call_and_replaces_older_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "layer017.call0009.safetensors"
    other = tmp_path / "layer005.call0000.safetensors"
    stale.write_text("an earlier run")
    other.write_text("another layer")
    options = (
        "--layer",
        "17",
        "--layer",
        "0-1",
        "--split",
        "64,65",
        "--decode",
        1,
        "--out",
        tmp_path,
        "--json",
    )
    assert run("capture", MODEL, "--tokens", TOKENS, *options) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert "200 tokens in 3 calls and 1 decode steps, 3 layers, core: 12 files" in shown.err
    assert document["verdict"] == "pass"
    assert document["layers"] == [0, 1, 17]
    assert document["lengths"] == [64, 65, 71]
    assert document["logits"]["n_positions"] == 201
    names = [f"layer{layer:03d}.call{call:04d}.safetensors" for layer in (0, 1, 17) for call in range(4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, other.name])
    ids = json.loads(TOKENS.read_text())["tokens"]
    assert document["token_hash"] == token_hash(ids)
    for written in document["cases"]:
        check_case(Path(written["path"]), written, document)


def check_case(path: Path, written: dict[str, Any], document: dict[str, Any]) -> None:
    case = read_case(path)
    assert case.op == "core"
    assert case.finite
    assert case["q"].shape[1:] == (2, 64)
    assert case["v"].shape == (written["n_tokens"], 4, 64)
    assert case.options.qk == "raw"
    assert case.origin.kind == "capture"
    assert case.origin.model == "tiny-qwen35moe"
    assert (case.origin.layer, case.origin.call) == (written["layer"], written["call"])
    assert case.origin.phase == ("decode" if written["call"] == 3 else "prefill")
    assert case.origin.token_hash == document["token_hash"]
    assert case.origin.engine == document["engine"]
    assert "torch_" in (case.origin.backend or "")
    assert case.model_config["linear_num_value_heads"] == 4
    assert str(ROOT) not in json.dumps([case.model_config, case.fingerprint])


REFUSALS: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "absent-model"}, 2, "absent-model: no such directory"),
    ({"layer": "19"}, 2, "layer 19 is full attention; GDN layers here are 0-2, 4-6, 8-10, 12-14, 16-18 "),
    ({"layer": "20"}, 2, "layer 20 is out of range"),
    ({"tokens": "absent.json"}, 2, "absent.json: no such file"),
    ({"ids": [0, 256]}, 2, "token 1 is 256 but the model's vocabulary has 256 ids"),
    ({"ids": [[1], [2]], "more": ["--split", "1"]}, 2, "holds a list of calls and --split is given too"),
    ({"ids": [1, 2], "more": ["--split", "3,1"]}, 2, "sums to 4 but there are 2 tokens"),
    ({"ids": [1, 2], "more": ["--decode", "1", "--early-stop"]}, 2, "--decode needs the logits"),
    ({"more": ["--split", "x"]}, 2, "'x' is no length"),
    ({"more": ["--max-memory", "x"]}, 2, "'x' is no DEVICE=SIZE"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "status", "complaint"), REFUSALS)
def test_what_cannot_be_captured_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], status: int, complaint: str
) -> None:
    tokens: object = change.get("tokens", TOKENS)
    if "ids" in change:
        tokens = tmp_path / "ids.json"
        tokens.write_text(json.dumps(change["ids"]))
    out = tmp_path / "captures"
    arguments = [change.get("model", MODEL), "--tokens", tokens, "--layer", change.get("layer", "17")]
    assert run("capture", *arguments, *change.get("more", []), "--out", out) == status
    shown = capsys.readouterr()
    assert complaint in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert not out.exists()


def standing_in_for_transformers(tmp_path: Path, code: str) -> Path:
    (tmp_path / "transformers.py").write_text(code)
    return tmp_path


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("raise ImportError('No module named transformers')", "transformers cannot be imported"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL; out of memory?"),
        ("import os; print('last words', flush=True); os._exit(3)", "ended with status 3: last words"),
    ],
)
def test_model_process_that_dies_is_reported_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, complaint: str
) -> None:
    out, fake = tmp_path / "captures", standing_in_for_transformers(tmp_path, code)
    arguments = ("--tokens", TOKENS, "--layer", 17, "--out", out, "--sys-path", fake)
    assert run("capture", MODEL, *arguments) == 3
    shown = capsys.readouterr()
    assert complaint in shown.err.replace("\n", " ")
    assert not out.exists()


def test_failed_capture_leaves_the_earlier_one_as_it_was(tmp_path: Path) -> None:
    earlier = tmp_path / "layer017.call0000.safetensors"
    earlier.write_text("kept")
    fake = tmp_path / "fake"
    fake.mkdir()
    standing_in_for_transformers(fake, "raise ImportError")
    arguments = ("--tokens", TOKENS, "--layer", 17, "--out", tmp_path, "--sys-path", fake)
    assert run("capture", MODEL, *arguments) == 3
    assert earlier.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fake", earlier.name]


def test_parent_never_imports_transformers() -> None:
    code = "import gdncheck.capture.run, sys; sys.exit('transformers' in sys.modules)"
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"what": "everything"}, "--what everything"),
        ({"dtype": "int8"}, "--dtype int8"),
        ({"tokens": []}, "no token"),
    ],
)
def test_library_twin_checks_what_the_command_line_would(
    tmp_path: Path, options: Any, complaint: str
) -> None:
    from gdncheck.capture.errors import BadInput

    with pytest.raises(BadInput, match=complaint):
        capture(MODEL, **{"tokens": [1], "layers": 17, "out": tmp_path / "out", **options})
    assert not (tmp_path / "out").exists()


def test_repeating_command_can_be_copied() -> None:
    import click

    from gdncheck.cli.capture import capture as command
    from gdncheck.cli.repeat import command_line

    words = ["DIR", "--tokens", "t.json", "--layer", "17", "--layer", "0-2", "--early-stop"]
    words += ["--split", "64,65", "--max-memory", "cpu=20GiB"]
    parent = click.Context(click.Group("gdncheck"), info_name="gdncheck")
    context = command.make_context("capture", list(words), parent=parent)
    again = command_line(context).split()
    assert again[:3] == ["gdncheck", "capture", "DIR"]
    assert sorted(again[3:]) == sorted(words[1:])


@pytest.mark.parametrize(("typed", "meant"), [("64", 64), ("64,", [64]), ("64,65", [64, 65])])
def test_split_is_printed_as_it_was_typed(typed: str, meant: Any) -> None:
    from gdncheck.cli.capture import Split

    split = Split().convert(typed, None, None)
    assert split == meant
    assert str(split) == typed


def test_make_capture_runs_the_command_with_its_variables(tmp_path: Path) -> None:
    variables = [f"MODEL={MODEL}", f"TOKENS={TOKENS}", "LAYERS=0,17", f"OUT={tmp_path}", "WHAT=rule"]
    # `make test` is a make itself, which would have this one tell the directories that it enters.
    command = ["make", "--no-print-directory", "-n", "capture", *variables]
    dry = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    line = f"gdncheck capture {MODEL} --tokens {TOKENS} --layer 0,17 --what rule --out {tmp_path}"
    assert line in dry.stdout, dry.stdout + dry.stderr
