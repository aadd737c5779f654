"""A child's end is told in one line with the signal and the kernel's own place."""

from __future__ import annotations

import sys
import sysconfig

import pytest
import torch
from gdncheck.capture.errors import CannotRun
from gdncheck.kernels import contract
from gdncheck.kernels.interface import KernelCall
from gdncheck.kernels.pool import WorkerPool
from gdncheck.kernels.process import child_environment, describe_end, stack_place
from gdncheck.kernels.protocol import KernelSpec

STACK = """noise
Fatal Python error: Segmentation fault

Current thread 0x00007f0 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/u/.venv/lib/python3.11/site-packages/torch/functional.py", line 9 in einsum
  File "/home/u/project/mine.py", line 12 in inner
  File "/home/u/project/mine.py", line 30 in kernel
  File "/home/u/repo/kernels/callable.py", line 120 in _run_packed
  File "<frozen runpy>", line 198 in _run_module_as_main
"""
OURS = STACK.replace("/home/u/project/mine.py", "/home/u/repo/kernels/worker.py")
SITE = STACK.replace("/home/u/project/", "/home/u/.venv/lib/python3.11/site-packages/fla/ops/")


@pytest.mark.parametrize(
    ("printed", "place"),
    [(STACK, "project/mine.py:12 (inner)"), (SITE, "ops/mine.py:12 (inner)"), (OURS, None), ("", None),
     ("an ordinary line\n", None)],
)  # fmt: skip
def test_the_place_of_a_crash_is_not_the_kernels(printed, place):
    assert stack_place(printed) == place


@pytest.mark.parametrize(
    ("status", "printed", "words"),
    [(-11, STACK, ["SIGSEGV", "mine.py:12"]), (-6, "", ["SIGABRT"]), (-9, "", ["SIGKILL", "memory"]),
     (3, "first\nlast words\n\n", ["status 3", "last words"]), (0, "", ["status 0"]),
     (-40, "", ["signal 40"])],
)  # fmt: skip
def test_the_end_of_a_child_is_described_without_its_cause(status, printed, words):
    text = describe_end(status, printed)
    for word in words:
        assert word in text
    assert "\n" not in text


def test_a_child_sees_a_gpu_that_it_must_not_use(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert child_environment(device="cpu")["CUDA_VISIBLE_DEVICES"] == ""
    assert child_environment(device="auto")["CUDA_VISIBLE_DEVICES"] == "3"
    assert child_environment({"A": "1"})["A"] == "1"


def test_another_interpreter_needs_gdncheck_installed(tmp_path):
    """The interpreter sees this environment's packages but not gdncheck; it is handed ours one by one."""
    other = tmp_path / "python"
    packages = sysconfig.get_path("purelib")
    # Without `site`, no .pth file is read, so that an editable install does not exist for it.
    other.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" -S "$@"\n')
    other.chmod(0o755)
    (tmp_path / "where_am_i.py").write_text(
        "import gdncheck.kernels.contract, site, sys\n"
        "def f(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):\n"
        "    raise RuntimeError(f'{sys.flags.no_site} {gdncheck.kernels.contract.__file__}')\n"
    )
    tensors = {name: torch.ones(1, 1, 1) for name in ("q", "k", "v")}
    tensors |= {"g": torch.zeros(1, 1), "beta": torch.ones(1, 1), "cu_seqlens": torch.tensor([0, 1])}
    spec = KernelSpec(
        name="where_am_i:f",
        module="where_am_i",
        attribute="f",
        by_import_path=True,
        python=str(other),
        sys_path=(str(tmp_path),),
    )
    with WorkerPool(device="cpu", time_limit=120) as pool:
        result = pool.open(spec).run([KernelCall(tensors=tensors)])[0]
    assert result.status == "error"
    assert f"1 {contract.__file__}" in result.message


def test_an_interpreter_that_is_not_there_is_told_with_a_traceback(tmp_path):
    spec = KernelSpec(name="m:f", module="m", attribute="f", by_import_path=True, python=str(tmp_path / "no"))
    with WorkerPool(device="cpu") as pool, pytest.raises(CannotRun, match="cannot start"):
        pool.open(spec)
