"""`gdncheck diff` from end to end: real workers, kernels by import path, JSON, exit codes, bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gdncheck.capture.casefile import write_case
from gdncheck.capture.make import make

KERNELS = """
import os, signal, time
import torch
from gdncheck.reference.emulation import emulate_chunk
torch.set_num_threads(1)

def good(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
    r = emulate_chunk(q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return r.output.to(v.dtype), r.final_state.float()

def zeroed(q, k, v, g, beta, **options):
    o, s = good(q, k, v, g, beta, **options)
    o[min(50, len(o) - 1), 1] = 0
    return o, s

def nan(q, k, v, g, beta, **options):
    o, s = good(q, k, v, g, beta, **options)
    o[42, 0, 3] = float("nan")
    return o, s

def killed(q, k, v, g, beta, **options):
    os.kill(os.getpid(), signal.SIGSEGV)

def asleep(q, k, v, g, beta, **options):
    time.sleep(600)

def raises(q, k, v, g, beta, **options):
    raise ValueError("no such tile")

def picky(q, k, v, g, beta, **options):
    return good(q, k, v, g, beta, **options)

picky.gdncheck_capabilities = {"input_dtypes": ["float32"]}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a module of kernels, a case, a case with NaN, and two layers of captures."""
    directory = tmp_path_factory.mktemp("diff")
    (directory / "some_kernels.py").write_text(KERNELS)
    case = make("qwen", lengths=[40, 30], k_heads=1, v_heads=2, dims=(32, 32), state="random")
    write_case(case, directory / "case.safetensors")
    bad = case["v"].clone()
    bad[45] = float("nan")
    write_case(case.with_tensors(v=bad), directory / "bad.safetensors")
    for layer in (1, 3):
        write_case(case, directory / "captures" / f"layer{layer:03d}.call0000.safetensors")
    (directory / "cut.safetensors").write_bytes((directory / "case.safetensors").read_bytes()[:3000])
    return directory


def run(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "gdncheck.cli", "diff", *words],
        cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def kernel(*names: str) -> list[str]:
    return [word for name in names for word in ("--kernel", f"some_kernels:{name}")]


def test_one_bad_kernel_takes_the_others_along(place):
    done = run(
        place, "case.safetensors", "--json", "--time-limit", "15",
        *kernel("good", "zeroed", "nan", "killed", "asleep", "raises", "picky"),
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert document["schema"] == 1
    assert document["verdict"] == "fail"
    results = {r["kernel"].split(":")[1]: r for r in document["results"]}
    words = {name: r["verdict"] for name, r in results.items()}
    assert words == {
        "good": "pass", "zeroed": "fail", "nan": "fail", "killed": "error", "asleep": "timeout", 
        "raises": "error", "picky": "skipped",
    }  # fmt: skip
    assert "SIGSEGV" in results["killed"]["reason"]
    assert "no such tile" in results["raises"]["reason"]
    assert results["zeroed"]["worst_tile"] == {
        "tensor": "output", "class": "wrong", "sequence": 1, "head": 1, "chunk": 0, "token": 10,
    }  # fmt: skip
    assert results["nan"]["first_nonfinite"] == {
        "tensor": "output", "class": "nan", "sequence": 1, "head": 0, "chunk": 0, "token": 2,
    }  # fmt: skip
    assert results["nan"]["error"]["output"] == "nan"
    assert results["good"]["first_nonfinite"] is None
    assert results["good"]["worst_tile"] is None
    for result in results.values():
        wanted = {
            "kernel", "case", "layer", "verdict", "tier", "reason", "contract_differences", "first_nonfinite",
            "worst_tile", "error",
        }  # fmt: skip
        assert wanted <= set(result)
        assert set(result["error"]) == {"output", "state"}


def test_bad_input_blames_the_kernel(place):
    done = run(place, "bad.safetensors", "--json", *kernel("good"))
    result = json.loads(done.stdout)["results"][0]
    assert done.returncode == 1
    assert result["verdict"] == "out-of-contract"
    assert "v is nan at token 5 of sequence 1" in result["reason"]
    assert "contained" in result["reason"]
    assert "did not contain" not in result["reason"]


def test_layers_are_not_all_judged_or_the_last_line_does_not_repeat(place):
    done = run(place, *kernel("good"), "--out", "report")
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 0, done.stderr
    assert last.startswith("pass in ")
    assert last.endswith("gdncheck diff --out report --kernel some_kernels:good")
    assert [r["layer"] for r in json.loads((place / "report" / "report.json").read_text())["results"]] == [
        None
    ] * 2
    assert (place / "report" / "report.txt").read_text().strip().endswith(last.split("; ")[1])


def test_a_tolerance_is_not_marked_in_the_report(place):
    done = run(place, "case.safetensors", *kernel("zeroed"), "--atol", "1e-9")
    assert done.returncode == 1
    assert "tolerance" in done.stdout


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["missing.safetensors"], 2, "missing.safetensors"),
        (["cut.safetensors"], 2, "cut.safetensors"),
        (["some_kernels.py"], 2, "some_kernels.py"),
        (["case.safetensors", "--layer", "1"], 2, "not both"),
        (["a", "b", "c"], 2, "two to compare"),
        (["--layer", "17"], 3, "layer 17"),
        (["--captures", "nowhere"], 3, "nowhere"),
        (["case.safetensors", "--kernel", "nosuch.chunk"], 2, "nosuch.chunk"),
        (["case.safetensors", "--kernel", "no_such_module:f"], 2, "no_such_module"),
        (["case.safetensors", "--kernel", "some_kernels:picky"], 3, ""),
        (["case.safetensors", "--kernel", "some_kernels:good", "--device", "cuda"], 3, "CUDA"),
        (["case.safetensors", "--atol", "-1"], 2, "atol"),
    ],
)
def test_bad_usage_ends_in_a_traceback_or_a_wrong_status(place, words, status, says):
    done = run(place, *words)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert says in done.stderr
    if status == 2:
        assert done.stdout == ""
    assert not list(place.glob("*.part"))
