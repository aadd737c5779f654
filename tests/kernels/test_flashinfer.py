"""FlashInfer's kernel without a GPU: how it is compiled, found and refused, and what it is handed."""

from __future__ import annotations

import stat

import pytest
import torch
from gdncheck.capture.errors import BadInput, CannotRun, Refused
from gdncheck.kernels import flashinfer, flashinfer_build
from gdncheck.kernels.interface import KernelCall, RunOptions

TEMPLATE = "launch<{{ is_gva }}, {{ needs_beta }}, {{ needs_alpha }}, {{ init_state }}, {{ dtype }}>"
COMPILER = """#!/bin/sh
echo "$@" >> {log}
out=; for word in "$@"; do [ "$last" = -o ] && out=$word; last=$word; done
case "$*" in *{failing}*) echo "x.cu(3): error: no luck" >&2; exit 2;; esac
echo object > "$out"
"""


@pytest.fixture
def toolchain(tmp_path, monkeypatch):
    """A wheel's data folder, and a compiler that only notes how it was called."""
    data = tmp_path / "data"
    (data / "csrc").mkdir(parents=True)
    (data / flashinfer_build.TEMPLATE).write_text(TEMPLATE)
    for name in flashinfer_build.LAUNCHERS:
        (data / name).write_text("launcher")
    (tmp_path / "cuda" / "include").mkdir(parents=True)
    (tmp_path / "cuda" / "include" / "cuda_runtime.h").touch()
    log = tmp_path / "calls"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(flashinfer_build, "ffi_includes", lambda: [tmp_path / "ffi"])

    def compiler(failing="NOTHING"):
        path = tmp_path / "nvcc"
        path.write_text(COMPILER.format(log=log, failing=failing))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CUDACXX", str(path))
        log.write_text("")
        return log

    return data, tmp_path / "built" / "gdn_prefill_sm90.so", compiler


def test_instances_are_the_four_that_production_calls():
    rendered = {i.name: i.render(TEMPLATE) for i in flashinfer_build.INSTANCES}
    assert set(rendered.values()) == {
        f"launch<{gva}, true, true, {state}, nv_bfloat16>"
        for gva in ("true", "false")
        for state in ("true", "false")
    }
    assert rendered["gdn_prefill_kernel_bf16_g1b1a1i0"] == "launch<true, true, true, false, nv_bfloat16>"


def test_template_of_another_version_is_refused():
    with pytest.raises(BadInput, match=r"unknown placeholder \{\{ use_cp \}\}"):
        flashinfer_build.INSTANCES[0].render(TEMPLATE + "{{ use_cp }}")


def test_library_appears_only_when_all_objects_are_there(toolchain):
    data, library, compiler = toolchain
    compiler(failing="prefill_kernel_delta_rule_sm90.cu")
    with pytest.raises(
        CannotRun, match=r"failed on prefill_kernel_delta_rule_sm90.cu: x.cu\(3\): error: no luck"
    ):
        flashinfer_build.build(data, library)
    assert not library.exists()
    log = compiler()
    lines = []
    assert flashinfer_build.build(data, library, report=lines.append) == library
    calls = log.read_text().splitlines()
    assert len(calls) == 2, f"finished objects were compiled again: {calls}"
    assert "-shared" in calls[-1]
    assert "lazy" in calls[-1]
    assert calls[-1].count(".o") >= 6
    assert [path.name for path in library.parent.iterdir()] == [library.name], (
        "something is left of the build"
    )
    assert sum("there already" in line for line in lines) == 5


def test_object_is_compiled_again_when_its_source_changed(toolchain):
    data, library, compiler = toolchain
    compiler(failing="-shared")
    with pytest.raises(CannotRun):
        flashinfer_build.build(data, library)
    (data / flashinfer_build.LAUNCHERS[0]).write_text("another launcher")
    log = compiler()
    flashinfer_build.build(data, library)
    assert len(log.read_text().splitlines()) == 2


def test_flags_that_decide_the_arithmetic_are_upstreams(toolchain):
    data, library, compiler = toolchain
    log = compiler()
    flashinfer_build.build(data, library)
    for call in log.read_text().splitlines()[:-1]:
        for flag in ("-use_fast_math", "-std=c++20", "-O3", "arch=compute_90a,code=sm_90a"):
            assert flag in call


def test_missing_compiler_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDACXX", raising=False)
    with pytest.raises(CannotRun, match="nvcc is not there; install the CUDA toolkit"):
        flashinfer_build.find_compiler()


def test_library_lies_beside_the_cache_that_its_sources_came_from(tmp_path, monkeypatch):
    root = tmp_path / "cache" / "kernels" / "flashinfer" / "0.6.6"
    assert (
        flashinfer.library_path(root, "0.6.6")
        == tmp_path / "cache/built/flashinfer-0.6.6/gdn_prefill_sm90.so"
    )
    monkeypatch.setenv("GDNCHECK_CACHE", str(tmp_path / "mine"))
    assert flashinfer.library_path(tmp_path / "site-packages", None).is_relative_to(tmp_path / "mine")


def test_named_library_that_is_missing_is_not_built_instead(monkeypatch, tmp_path):
    monkeypatch.setenv(flashinfer.LIBRARY_VARIABLE, str(tmp_path / "none.so"))
    with pytest.raises(CannotRun, match="which is no file"):
        flashinfer.find_library("0.6.6")


def test_gate_is_handed_over_as_linear_float32_decay():
    g = torch.tensor([[0.0, -1.0], [-float("inf"), -20.0]])
    made = flashinfer.kernel_arguments(
        {
            "g": g,
            "beta": torch.ones(2, 2, dtype=torch.bfloat16),
            "v": torch.zeros(2, 2, 128, dtype=torch.bfloat16),
            "cu_seqlens": torch.tensor([0, 2], dtype=torch.int32),
        }
    )
    assert torch.equal(made["alpha"], g.exp())
    assert made["alpha"].max() <= 1
    assert made["beta"].dtype == torch.float32
    assert made["cu_seqlens"].dtype == torch.int64


@pytest.mark.parametrize("lengths", [[0, 65], [65, 0, 70], [65, 0]])
def test_an_empty_sequence_reaches_the_kernel_that_hangs_on_it(lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    call = KernelCall(tensors={"cu_seqlens": offsets})
    with pytest.raises(Refused, match=f"sequence {lengths.index(0)} is empty"):
        flashinfer.check_all_filled(call)
    allowed = RunOptions(extra={"allow_empty": True})
    flashinfer.check_all_filled(KernelCall(tensors=call.tensors, options=allowed))
    flashinfer.check_all_filled(KernelCall(tensors={"cu_seqlens": torch.tensor([0, 1, 66])}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is wrong where there is no GPU")
def test_machine_without_sm90_is_told_so():
    with pytest.raises(CannotRun, match="runs on SM90"):
        flashinfer.Chunk("0.6.6")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(2, 2), (1, 4)])
@pytest.mark.parametrize("state", ["none", "random"])
def test_compiled_kernel_agrees_with_the_truth(engine, heads, state):
    """Needs $GDNCHECK_FLASHINFER_LIBRARY or nvcc: every one of the four instances once."""
    from gdncheck.capture.make import make
    from gdncheck.reference.truth import truth

    case = make(
        "gaussian", lengths=[64, 1, 70], k_heads=heads[0], v_heads=heads[1], dims=(128, 128), state=state
    )
    handle = engine("flashinfer.chunk@0.6.6", device="cuda")
    result = handle.run([KernelCall(tensors=case.tensors, options=RunOptions())])[0]
    assert result.status == "ok", result.message
    output, final = truth(
        case["q"], case["k"], case["v"], case["g"], case["beta"], initial_state=case.get("initial_state"),
        cu_seqlens=case["cu_seqlens"],
    )  # fmt: skip
    for found, wanted in ((result.outputs["output"], output), (result.outputs["final_state"], final)):
        assert ((found.double() - wanted).norm() / wanted.norm()).item() < 0.006
