"""Workers: whatever a kernel does to its process, every call gets its one result and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gdncheck.capture.errors import BadInput, CannotRun
from gdncheck.kernels.interface import KernelCall, RunOptions
from gdncheck.kernels.pool import WorkerPool
from gdncheck.kernels.protocol import as_bytes

HOSTILE = Path(__file__).parent / "hostile"
ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120.0


def tensors(T=6, HK=1, HV=2, K=4, V=3, lengths=(2, 4), dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    return {
        "q": torch.randn(T, HK, K, generator=generator).to(dtype),
        "k": torch.randn(T, HK, K, generator=generator).to(dtype),
        "v": torch.randn(T, HV, V, generator=generator).to(dtype),
        "g": -torch.rand(T, HV, generator=generator),
        "beta": torch.rand(T, HV, generator=generator).to(dtype),
        "cu_seqlens": cu_seqlens,
        "initial_state": torch.randn(len(lengths), HV, K, V, generator=generator),
    }


def call(fault="", given=None, poison=None, **extra):
    extra = {"fault": fault, **extra} if fault else extra
    return KernelCall(tensors=given or tensors(), options=RunOptions(extra=extra, poison=poison))


@pytest.fixture(scope="module")
def pool():
    sys.path.insert(0, str(HOSTILE))
    try:
        with WorkerPool(device="cpu", time_limit=LIMIT) as opened:
            yield opened
    finally:
        sys.path.remove(str(HOSTILE))


@pytest.fixture(scope="module")
def echo(pool):
    return pool.open("hostile_kernels:echo")


def survives(handle, fault, **limits):
    """The result of a faulty call between two good ones, whose results must be intact."""
    before, faulty, after = handle.run([call(), call(fault), call()], **limits)
    given = tensors()
    for good in (before, after):
        assert (good.status, good.message) == ("ok", None)
        assert torch.equal(good.outputs["output"], given["v"])
        assert torch.equal(good.outputs["final_state"], given["initial_state"])
    return faulty


@pytest.mark.parametrize(
    ("fault", "name"),
    [("segv", "SIGSEGV"), pytest.param("abort", "SIGABRT", marks=pytest.mark.slow)],
)
def test_a_crash_takes_other_results_along_or_is_not_named(echo, fault, name):
    result = survives(echo, fault)
    assert result.status == "crash"
    assert name in result.message
    assert "hostile_kernels.py" in result.message
    assert "\n" not in result.message
    assert result.outputs == {}


@pytest.mark.slow
def test_an_exit_of_the_process_is_taken_for_a_result(echo):
    result = survives(echo, "exit")
    assert (result.status, "status 7" in result.message) == ("crash", True)


@pytest.mark.parametrize("fault", ["sleep", "flood"])
def test_a_kernel_that_never_ends_holds_up_the_run(echo, fault):
    assert survives(echo, "print").status == "ok"  # the worker is warm: the limit is the call's own
    result = survives(echo, fault, time_limit=1.0)
    assert result.status == "timeout"
    assert "no result after 1 s" in result.message
    if fault == "sleep":
        assert "hostile_kernels.py" in result.message


def test_the_time_limit_counts_for_the_batch_instead_of_the_call(echo):
    echo.run([call()])
    results = echo.run([call(seconds=0.4)] * 4, time_limit=1.2)
    assert [result.status for result in results] == ["ok"] * 4


ERRORS = [
    ("raise", ["ValueError", "first line second line", "hostile_kernels.py"]),
    ("sys.exit", ["SystemExit", "I am done"]),
    ("none", ["NoneType", "(o, final_state)"]),
    ("three", ["3 values"]),
    ("numpy", ["ndarray"]),
]


@pytest.mark.parametrize(("fault", "words"), ERRORS, ids=[fault for fault, _ in ERRORS])
def test_a_wrong_return_or_an_exception_is_not_told_in_one_line(echo, fault, words):
    started = echo.processes_started
    result = survives(echo, fault)
    assert result.status == "error"
    for word in words:
        assert word in result.message
    assert "\n" not in result.message
    assert len(result.message) < 700
    assert echo.processes_started <= started + 1, "an error is no reason for a new process"


def test_a_wrong_shape_or_dtype_is_kept_from_the_verdict(echo):
    shape, integers, no_state = echo.run([call("shape"), call("integers"), call("no state")])
    assert shape.outputs["output"].shape == (5, 2, 3)
    assert integers.outputs["output"].dtype == torch.int64
    assert set(no_state.outputs) == {"output"}


def test_what_a_kernel_prints_is_read_as_an_answer(echo):
    assert survives(echo, "print").status == "ok"


def test_a_write_into_the_inputs_goes_unseen(echo):
    assert survives(echo, "writes").evidence["inputs_written"] == ["beta"]
    assert "inputs_written" not in echo.run([call()])[0].evidence


@pytest.mark.parametrize(("kind", "holds"), [("nan", torch.isnan), ("huge", lambda x: x > 1e29)])
def test_fresh_memory_is_not_poisoned_when_asked(echo, kind, holds):
    poisoned, sound, clean = echo.run([call("reads fresh memory", poison=kind), call(poison=kind), call()])
    assert holds(poisoned.outputs["output"].float()).all()
    assert holds(poisoned.outputs["final_state"]).all()
    assert poisoned.evidence["poison"] == kind
    assert poisoned.evidence["poisoned_buffers"] == 2
    assert poisoned.evidence["poisoned_bytes"] == 6 * 2 * 3 * 2 + 2 * 2 * 4 * 3 * 4
    assert torch.equal(sound.outputs["output"], tensors()["v"])
    assert "poison" not in clean.evidence


def test_a_write_or_a_read_past_the_end_goes_unseen(echo):
    guarded = RunOptions(guard=True, extra={"fault": "overruns"})
    sound = RunOptions(guard=True, extra={"fault": "count"})
    faulty, clean = echo.run([KernelCall(tensors=tensors(), options=options) for options in (guarded, sound)])
    assert (faulty.status, clean.status) == ("ok", "ok"), faulty.message
    found = {(hit["buffer"], hit["side"], hit["bytes"]) for hit in faulty.evidence["guard_written"]}
    assert found == {("fresh buffer 7 (bfloat16 6x2x3)", "after", 6), ("input beta", "before", 2)}
    assert clean.evidence["guard_written"] == []
    assert clean.evidence["guarded_buffers"] == 7
    assert torch.equal(faulty.outputs["output"], tensors()["v"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nan_payloads_and_signed_zeros_change_on_the_way(echo, dtype):
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    generator = torch.Generator().manual_seed(1)
    span = torch.iinfo(bits)
    patterns = torch.randint(span.min, span.max, (16384,), generator=generator, dtype=bits)
    if bits == torch.int16:
        patterns = torch.cat([torch.arange(span.min, span.max + 1, dtype=torch.int32).to(bits)])
    n = patterns.numel() // 2
    given = tensors(T=n, HV=2, V=1, lengths=(n,), dtype=dtype)
    given["v"] = patterns.view(dtype).reshape(n, 2, 1)
    result = echo.run([call(given=given)])[0]
    assert torch.equal(as_bytes(result.outputs["output"]), as_bytes(given["v"]))


def test_a_batch_of_fifty_quick_calls_mixes_up_results(echo):
    started = echo.processes_started
    given = [tensors(seed=seed) for seed in range(50)]
    results = echo.run([call(given=g) for g in given])
    assert [r.status for r in results] == ["ok"] * 50
    for g, result in zip(given, results, strict=True):
        assert torch.equal(result.outputs["output"], g["v"])
        assert result.seconds >= 0
    assert echo.processes_started == started


def test_empty_and_large_tensors_do_not_arrive(echo):
    empty = tensors(T=0, lengths=())
    large = tensors(T=4, HV=8, K=128, V=128, lengths=(1, 1, 2))
    large["initial_state"] = torch.zeros(3, 8, 1024, 512)
    large["q"] = large["k"] = torch.zeros(4, 1, 1024, dtype=torch.bfloat16)
    large["v"] = torch.zeros(4, 8, 512, dtype=torch.bfloat16)
    none, big = echo.run([call(given=empty), call("large", given=large)])
    assert none.outputs["output"].shape == (0, 2, 3)
    assert none.outputs["final_state"].shape == (0, 2, 4, 3)
    expected = torch.arange(3 * 8 * 1024 * 512, dtype=torch.float32)
    assert torch.equal(big.outputs["final_state"].flatten(), expected)


def test_a_call_in_a_fresh_process_sees_what_an_earlier_one_left(echo):
    warm = echo.run([call("count")] * 2)
    seen = [r.outputs["output"].flatten()[0].item() for r in warm]
    assert seen[1] == seen[0] + 1
    fresh = echo.run([call("count")] * 2, fresh_process=True)
    assert [r.outputs["output"].flatten()[0].item() for r in fresh] == [1, 1]
    assert len({r.outputs["final_state"].flatten()[0].item() for r in [*warm, *fresh]}) == 3


WRONG_NAMES = [
    ("hostile_kernels:nothing", BadInput, "has no nothing"),
    ("hostile_kernels:not_a_function", BadInput, "int"),
    ("no_such_module_here:f", BadInput, "no_such_module_here"),
]


def test_a_function_that_cannot_be_loaded_is_not_told_in_one_line(pool):
    handles = []
    for name, _, _ in WRONG_NAMES:
        handles.append(pool.begin(name))
    for handle, (_, kind, word) in zip(handles, WRONG_NAMES, strict=True):
        with pytest.raises(kind) as raised:
            handle.run([call()])
        assert word in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_asking_for_a_gpu_that_is_not_there_starts_anything(pool):
    with pytest.raises(CannotRun, match="no CUDA device") as raised:
        pool.open("hostile_kernels:echo", device="cuda")
    assert "hostile_kernels:echo" in str(raised.value)


def test_a_worker_at_the_root_of_the_repository_sees_our_folders_as_packages(pool, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    names = ["kernels", "capture", "compare", "reference", "hostile_kernels", "transformers"]
    result = pool.open("hostile_kernels:echo").run([call("packages", names=names)])[0]
    found = eval(result.message.partition("RuntimeError: ")[2].rpartition(" (")[0])
    for name in ("kernels", "capture", "compare", "reference"):
        assert found[name] is None or not found[name].strip("[]'").startswith(str(ROOT / name))
    assert found["hostile_kernels"] == str(HOSTILE / "hostile_kernels.py")
    assert found["transformers"] is not None


SCRIPT = """
import os, sys, time
sys.path.insert(0, {hostile!r})
import torch
from gdncheck.kernels.interface import KernelCall, RunOptions
from gdncheck.kernels.pool import WorkerPool
T = 2
tensors = dict(q=torch.ones(T, 1, 2), k=torch.ones(T, 1, 2), v=torch.ones(T, 1, 2), g=torch.zeros(T, 1),
               beta=torch.ones(T, 1), cu_seqlens=torch.tensor([0, T]))
with WorkerPool(device="cpu") as pool:
    handle = pool.open("hostile_kernels:echo")
    handle.run([KernelCall(tensors=tensors)])
    heavy = [m for m in ("triton", "fla", "transformers", "vllm", "flashinfer") if m in sys.modules]
    print("ready", handle._worker.process.pid, heavy, flush=True)
    handle.run([KernelCall(tensors=tensors, options=RunOptions(extra=dict(fault="child")))])
"""


def group_is_gone(group):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_parent_that_is_interrupted_or_killed_leaves_workers_behind(how):
    """The kernel hangs in itself and in a process that it forked; both must go, however the parent goes."""
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", SCRIPT.format(hostile=str(HOSTILE))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that a shell runs in the background is deaf to Ctrl-C, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        word, worker, heavy = parent.stdout.readline().split(maxsplit=2)
        assert (word, heavy.strip()) == ("ready", "[]"), "the parent imported a kernel's package"
        time.sleep(0.3)
        parent.send_signal(how)
        _, said = parent.communicate(timeout=60)
        assert parent.returncode != 0
        assert ("KeyboardInterrupt" in said) == (how == signal.SIGINT)
        assert group_is_gone(int(worker))
    finally:
        parent.kill()
        parent.wait()
