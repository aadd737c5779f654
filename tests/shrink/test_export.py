"""An exported script shows the fault without gdncheck, passes on a mended kernel, tells no secrets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import msgspec
import pytest
from gdncheck.capture.case import Origin
from gdncheck.capture.casefile import read_case
from gdncheck.capture.errors import BadInput
from gdncheck.compare.export import export
from gdncheck.compare.finding import facts_in, with_facts
from gdncheck.compare.shrink import shrink
from gdncheck.kernels.contract import Capabilities
from gdncheck.kernels.registry import own_kernels
from gdncheck.kernels.standalone import standalone

BLOCKED = (
    "import runpy, sys; sys.modules['gdncheck'] = None; sys.argv = ['repro.py', *sys.argv[1:]]; "
    "runpy.run_path('repro.py', run_name='__main__')"
)


def script(directory, folder, *words):
    """Run repro.py in a process that cannot import gdncheck."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, "-I", "-c", BLOCKED, "--folder", str(folder), *words],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


@pytest.fixture
def mended(with_processes, tmp_path):
    """A folder in which the kernel that a script asks for is the mended one."""

    def build(name):
        folder = tmp_path / "mended"
        folder.mkdir()
        text = (with_processes / "shrinkable.py").read_text()
        (folder / "shrinkable.py").write_text(f"{text}\n\n{name} = sound\n")
        return folder

    return build


def test_a_script_needs_gdncheck_or_fails_on_a_mended_kernel(with_processes, leak, mended, tmp_path):
    done = export(leak.path, tmp_path / "report", device="cpu")
    assert done.script_status == 1, "it was run here, and did not show the fault"
    shown = script(tmp_path / "report", with_processes)
    assert shown.returncode == 1, shown.stdout + shown.stderr
    assert "failing input: 3 of 3 runs show it" in shown.stdout
    assert "passing input: 0 of" in shown.stdout
    assert "agrees with the first to" in shown.stdout
    passed = script(tmp_path / "report", mended("leaks"))
    assert passed.returncode == 0, passed.stdout + passed.stderr


def test_a_report_lacks_a_line_or_tells_where_it_was_made(with_processes, leak, tmp_path):
    case = read_case(leak.path)
    private = msgspec.structs.replace(
        case, origin=Origin(kind="capture", model="secret-model", token_hash="ab" * 32, layer=3)
    )
    facts = msgspec.structs.replace(facts_in(case), reason="raised in /home/someone/work/kernel.py:3")
    done = export(with_facts(private, facts), tmp_path / "report", device="cpu", run=True)
    text = (tmp_path / "report" / "report.md").read_text()
    for words in (
        "| failing | passing |",
        "95 % interval",
        "torch |",
        "## Controls",
        "another formula in float64",
    ):
        assert words in text
    everything = text + (tmp_path / "report" / "repro.py").read_text()
    for word in ("/home/", str(tmp_path), str(with_processes), "secret-model", "abab", os.uname().nodename):
        assert word not in everything, word
    assert done.facts.signature == facts.signature


@pytest.mark.slow
def test_a_schedule_or_seeded_values_do_not_show_the_fault(with_processes, small_case, mended, tmp_path):
    out = tmp_path / "small.safetensors"
    shrink(
        small_case(129),
        "shrinkable:boundary",
        deviations={"split": "at-63"},
        budget=200.0,
        device="cpu",
        out=out,
    )
    done = export(out, tmp_path / "report", device="cpu", values="seeded")
    assert done.values == "seeded", done.note
    assert not (tmp_path / "report" / "tensors.safetensors").read_bytes().count(b"failing.q")
    assert script(tmp_path / "report", with_processes).returncode == 1
    assert script(tmp_path / "report", mended("boundary")).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lengths"), [("crashes", (21,)), ("hangs", (17,)), ("flaky", (21,))])
def test_a_crash_a_hang_or_a_flake_is_not_shown(name, lengths, with_processes, small_case, mended, tmp_path):
    case = small_case(*lengths, v_heads=1, state="none")
    out = tmp_path / "small.safetensors"
    shrink(case, f"shrinkable:{name}", budget=60.0, device="cpu", time_limit=5.0, out=out)
    export(out, tmp_path / "report", device="cpu")
    assert script(tmp_path / "report", with_processes).returncode == 1
    assert script(tmp_path / "report", mended(name)).returncode == 0


def test_a_directory_with_files_is_written_over(leak, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(BadInput, match="is not empty"):
        export(leak.path, tmp_path)


def test_a_case_that_does_not_fail_is_exported(with_processes, leak, tmp_path):
    with pytest.raises(BadInput, match="does not fail on it as was kept"):
        export(leak.path, tmp_path / "report", "shrinkable:leaks_mended", device="cpu")
    assert not (tmp_path / "report").exists()


KNOWN = [
    ("fla", "chunk", "0.4.0"), ("fla", "chunk", "0.6.0"), ("fla", "recurrent", "0.4.0"),
    ("vllm", "chunk", "0.19.1"), ("vllm", "chunk", "0.33.0"), ("sglang", "chunk", "0.5.23"),
    ("flashinfer", "chunk", "0.6.6"), ("transformers", "chunk", "5.24.0"),
    ("transformers", "recurrent", None),
]  # fmt: skip


@pytest.mark.parametrize(("family", "op", "version"), KNOWN)
def test_a_familys_call_is_no_python_or_has_words_left_over(family, op, version):
    capabilities = own_kernels()[f"{family}.{op}"].capabilities
    part = standalone(family, op, version=version, capabilities=capabilities)
    assert part is not None
    compile(part.text, f"{family}.{op}", "exec")
    assert "@" not in part.text
    assert "gdncheck" not in part.text
    assert version is None or part.package.endswith(f"=={version}")


def test_a_chunk_size_that_a_function_ignores_is_put_into_a_script():
    capabilities = Capabilities(chunk_sizes=(16, 32, 64))
    assert standalone("fla", "chunk", version="0.4.0", capabilities=capabilities, chunk_size=16) is None
    newer = standalone("fla", "chunk", version="0.6.0", capabilities=capabilities, chunk_size=16)
    assert "chunk_size=16" in newer.text


@pytest.mark.skipif(shutil.which("git") is None, reason="names a working tree")
def test_a_working_trees_path_is_in_a_report():
    from gdncheck.compare.export.upstream import public, public_name

    assert public_name("vllm.chunk@path:/home/me/vllm") == "vllm.chunk of a working tree"
    assert public("KeyError (/home/me/x/kernel.py:3)") == "KeyError (kernel.py:3)"
