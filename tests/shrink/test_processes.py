"""What only processes can show: crashes, hangs, kills in the middle, the commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from gdncheck.capture.casefile import read_case, write_case
from gdncheck.compare.replay import replay
from gdncheck.compare.shrink import shrink


def command(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "gdncheck.cli", *map(str, words)],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONSAFEPATH": "1"}, **options,
    )  # fmt: skip


@pytest.mark.slow
def test_a_crash_takes_the_shrinking_along(with_processes, small_case, tmp_path):
    out = tmp_path / "small.safetensors"
    found = shrink(
        small_case(60, 9, v_heads=1, state="none"), "shrinkable:crashes", budget=400.0, device="cpu", out=out
    )
    assert found.fault.kind == "crash"
    assert "SIGSEGV" in found.attempt.reason
    assert found.case.lengths == [21]
    assert replay(out).outcome == "same"


@pytest.mark.slow
def test_a_hang_takes_the_whole_time_limit_for_every_candidate(with_processes, small_case, tmp_path):
    out = tmp_path / "small.safetensors"
    case = small_case(30, 17, 9, v_heads=1, state="none")
    found = shrink(case, "shrinkable:hangs", budget=200.0, device="cpu", out=out, time_limit=5.0)
    assert found.fault.kind == "timeout"
    assert found.case.lengths == [17]
    assert replay(out, "shrinkable:hangs_mended").outcome == "passes"


@pytest.mark.slow
def test_a_killed_shrink_begins_anew_or_ends_elsewhere(with_processes, small_case, tmp_path):
    start, out = tmp_path / "start.safetensors", tmp_path / "small.safetensors"
    write_case(small_case(129), start)
    words = [
        "shrink",
        start,
        "--kernel",
        "shrinkable:slow",
        "-o",
        out,
        "--axis",
        "split=at-63",
        "--device",
        "cpu",
    ]
    sizes = []
    for wait in (12, 14, 16):
        running = subprocess.Popen(
            [sys.executable, "-m", "gdncheck.cli", *map(str, words)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )  # fmt: skip
        time.sleep(wait)
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        if out.exists():
            sizes.append(read_case(out).n_tokens)
    assert sizes == sorted(sizes, reverse=True)
    done = command(*words, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["smallest"]["lengths"] == [65]
    assert found["stopped"] == "smallest"


@pytest.mark.slow
def test_the_commands_end_in_a_traceback(with_processes, leak, tmp_path):
    done = command("replay", leak.path, "--device", "cpu", "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["outcome"] == "same"
    done = command(
        "shrink", leak.path, "--kernel", "shrinkable:leaks_mended", "-o", tmp_path / "x.safetensors"
    )
    assert done.returncode == 2
    assert "does not fail on it" in done.stderr
    assert "Traceback" not in done.stderr
