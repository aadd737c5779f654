"""Shared memory made dirty before every launch of a call that asks for it, and of no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from gdncheck.capture.errors import Refused
from gdncheck.capture.make import make
from gdncheck.compare.sweep.jsonout import document
from gdncheck.compare.sweep.sweep import sweep
from gdncheck.kernels import shared_memory
from gdncheck.kernels.interface import KernelCall, RunOptions
from gdncheck.kernels.loading import Device
from gdncheck.kernels.pool import WorkerPool
from gdncheck.kernels.shared_memory import DirtySharedMemory, install
from gdncheck.kernels.worker import run_call

HOSTILE = Path(__file__).parent / "hostile"
READER = "shared_reader:rule"
SOUND = "gdncheck.kernels.planted_triton:rule"
LARGEST = {"sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448}
"""Shared memory that one block may have: CUDA C++ Programming Guide, table of compute capabilities, less the
1 kB that the system keeps of each block."""


class Launcher:
    """As Triton's JITFunction; remembers what happened in order."""

    log: ClassVar[list] = []

    def run(self, *args, grid, warmup, **kwargs):
        self.log.append(args[0])
        return args[0]


@pytest.fixture
def launcher():
    """launcher(name, warmup=False): a launch of a kernel of that name."""
    Launcher.log = []
    stock = Launcher.run
    install(Launcher)
    yield lambda name, warmup=False: Launcher().run(name, grid=(1,), warmup=warmup)
    Launcher.run = stock


def dirty(launcher):
    return DirtySharedMemory("nan", fill=lambda: launcher("fill"))


def test_a_launch_finds_clean_memory_or_the_filling_fills_itself(launcher):
    call = dirty(launcher)
    with call:
        assert launcher("a") == "a"
        launcher("b")
        launcher("compiled only", warmup=True)
    assert Launcher.log == ["fill", "fill", "a", "fill", "b", "compiled only"]
    assert call.evidence()["shared_memory"] == {"filled_with": "nan", "launches": 2, "bytes": 0}


def test_other_calls_are_disturbed(launcher):
    launcher("before")
    with pytest.raises(ZeroDivisionError), dirty(launcher):
        raise ZeroDivisionError
    launcher("after")
    assert Launcher.log == ["before", "fill", "after"]


def test_launches_are_filled_twice_after_a_second_installation(launcher):
    install(Launcher)
    with dirty(launcher):
        launcher("a")
    assert Launcher.log == ["fill", "fill", "a"]


def test_the_axis_is_claimed_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Refused, match="on a GPU only"):
        DirtySharedMemory("nan")
    call = KernelCall(tensors={}, options=RunOptions(shared="huge"))
    finished, outputs = run_call(None, call, Device("cpu", ("cpu",)))
    assert (finished.status, outputs) == ("refused", [])
    assert shared_memory._active is None


def test_a_sweep_on_a_cpu_does_not_say_that_shared_memory_is_left_out():
    report = sweep(
        make("qwen", lengths=[5], k_heads=1, v_heads=2, dims=(16, 16)), kernels=["emulation.chunk"],
        device="cpu", only=["memory"], axes={"memory": ["shared-nan", "shared-huge"]},
    )  # fmt: skip
    (left,) = [r for r in report.sweeps[0].not_covered if r["axis"] == "memory"]
    assert left["value"] == "shared-nan, shared-huge"
    assert "needs a GPU" in left["reason"]


COMPILE = """
import json, sys
import triton
from gdncheck.kernels.shared_fill import WARPS, fill_kernel, sizes_of
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

types = {"seen": "*i32", "bits": "i32", "SIZES": "constexpr", "WARPS": "constexpr"}
found = {}
for name, n_bytes in json.loads(sys.argv[1]).items():
    source = GluonASTSource(
        fn=fill_kernel, signature=types, constexprs={"SIZES": sizes_of(n_bytes), "WARPS": WARPS}
    )
    target = GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    compiled = triton.compile(source, target=target, options={"num_warps": WARPS})
    # 16 bytes per thread and store; allocations below one store are written several times over.
    found[name] = compiled.metadata.shared, compiled.asm["ptx"].count("st.shared") * WARPS * 32 * 16
print(json.dumps(found))
"""


def test_part_of_a_multiprocessors_memory_stays_clean():
    """Compiled for each GPU without one: it takes all that a block may have, no more, and stores to it."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(LARGEST)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, (taken, stored) in json.loads(done.stdout).items():
        assert taken == LARGEST[name], name
        assert stored >= taken - 4096, name


@pytest.mark.gpu
def test_leftovers_in_shared_memory_are_read_unseen(monkeypatch):
    monkeypatch.syspath_prepend(str(HOSTILE))
    case = make("qwen", lengths=[20, 7], k_heads=1, v_heads=2, dims=(32, 32), state="random")
    report = sweep(case, kernels=[READER], device="cuda", only=["memory"])
    plain = document(report)
    assert plain["first_nonfinite"]["deviations"] == {"memory": "shared-nan"}
    assert plain["first_nonfinite"]["place"]["token"] == 3
    assert plain["first_nonfinite"]["nearest_passing"]["change"] == {"memory": "clean"}
    verdicts = {a["config"]["memory"]: a["verdict"] for a in plain["results"]}
    assert verdicts == {
        "clean": "pass", "nan": "pass", "huge": "pass", "guard": "pass", "shared-nan": "fail",
        "shared-huge": "pass",
    }  # fmt: skip


@pytest.mark.gpu
def test_a_sound_kernel_is_changed_by_dirty_shared_memory_or_a_multiprocessor_is_missed():
    case = make("qwen", lengths=[20, 7], k_heads=1, v_heads=2, dims=(32, 32), state="random")
    names = ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state")
    tensors = {name: case[name] for name in names}
    with WorkerPool(device="cuda", time_limit=120) as pool:
        calls = [KernelCall(tensors=tensors, options=RunOptions(shared=s)) for s in (None, "nan", "huge")]
        clean, *others = pool.open(SOUND).run(calls)
    assert "shared_memory" not in clean.evidence
    for result in others:
        assert torch.equal(result.outputs["final_state"], clean.outputs["final_state"])
        found = result.evidence["shared_memory"]
        assert found["launches"] >= 1
        reached, all_of_them = found["multiprocessors"].split(" of ")
        assert reached == all_of_them
