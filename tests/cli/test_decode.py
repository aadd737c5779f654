"""`gdncheck decode` from end to end: exit codes, JSON, wrong arguments in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from gdncheck.capture.casefile import write_case
from gdncheck.capture.errors import BadInput
from gdncheck.capture.make import make

from gdncheck.cli.decode import decode

KERNELS = """
from gdncheck.reference.emulation_recurrent import emulate_recurrent

def good(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
    r = emulate_recurrent(q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return r.output.to(v.dtype), r.final_state.to(initial_state.dtype)

def narrow(q, k, v, g, beta, **call):
    output, state = good(q, k, v, g, beta, **call)
    return output, state.bfloat16().float()

def narrow_named(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
    return narrow(q, k, v, g, beta, scale=scale, initial_state=initial_state,
                  output_final_state=output_final_state, cu_seqlens=cu_seqlens)

gdncheck_capabilities = {
    "default_chunk_size": None, "profile": "fla-recurrent", "state_dtypes": ("float32", "bfloat16"),
}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    case = make("qwen", lengths=[20], k_heads=1, v_heads=2, dims=(8, 16), state="random", seed=2)
    write_case(case, tmp_path / "case.safetensors")
    Path(tmp_path / "steppers.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words):
    return CliRunner().invoke(decode, list(words), standalone_mode=False)


def test_narrow_state_exits_1_and_the_json_says_at_which_step(folder):
    done = run(
        "case.safetensors", "--steps", "20", "--kernel", "steppers:good", "--kernel", "steppers:narrow_named",
        "--device", "cpu", "--json",
    )  # fmt: skip
    assert done.exception is None, done.output
    assert done.return_value == 1
    found = json.loads(done.output)
    assert found["schema"] == 1
    assert found["verdict"] == "fail"
    good, narrow = found["results"]
    assert good["verdict"] == "pass"
    assert narrow["verdict"] == "fail"
    assert good["points"][0]["step"] == 1
    assert narrow["points"][0]["departs"]
    assert good["profile"]["state"] == "fp32"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--state-dtype", "int8", "--kernel", "emulation.recurrent"], "int8"),
        (["--draft", "2"], "drafts need a kernel"),
        (["--l2norm", "before", "--kernel", "emulation.recurrent"], "normalised already"),
    ],
)
def test_wrong_argument_is_one_line_before_any_kernel_runs(folder, words, message):
    done = run("case.safetensors", *words)
    assert isinstance(done.exception, BadInput)
    assert message in str(done.exception)
    assert "\n" not in str(done.exception)
