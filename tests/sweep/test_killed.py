"""A sweep whose process is killed, wherever it is, goes on from its store and gives the same answer."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gdncheck.capture.casefile import write_case

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
WORDS = ("--kernel", "planted:state_bf16", "--device", "cpu", "--json")
AXES = ("--only", "state,state_dtype,memory", "--axis", "state=zeros,random", "--depth", "2")


def started(case, out, *more):
    command = [
        sys.executable,
        "-P",
        "-m",
        "gdncheck.cli",
        "sweep",
        str(case),
        *WORDS,
        *AXES,
        "--out",
        str(out),
        *more,
    ]
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=out.parent
    )


def answer(text):
    """The document without times and paths."""
    plain = json.loads(text)
    for row in (plain, *plain["kernels"], *plain["results"]):
        for name in ("seconds", "command", "case"):
            row.pop(name, None)
    for name in ("first_nonfinite", "first_wrong", "first_error"):
        (plain[name] or {}).pop("case", None)
    for kernel in plain["kernels"]:
        for finding in kernel["findings"]:
            finding.pop("case", None)
    return plain


def children_of(pid):
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in found.stdout.split()]


def gone(pid, limit=20.0):
    end = time.monotonic() + limit
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        # A zombie that nobody waits for has ended, too.
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("seed", [1])
def test_a_sweep_that_was_killed_gives_another_answer_or_leaves_workers_behind(small_case, tmp_path, seed):
    case = write_case(small_case(), tmp_path / "case.safetensors")
    begun = time.monotonic()
    whole = started(case, tmp_path / "whole")
    text, errors = whole.communicate(timeout=300)
    took = time.monotonic() - begun
    assert whole.returncode == 1, errors
    dice, out, more, kills = random.Random(seed), tmp_path / "run", [], 0
    while kills < 3:
        process = started(case, out, *more)
        time.sleep(dice.uniform(0.2, 0.6) * took)
        workers = children_of(process.pid)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += 1
        assert all(gone(pid) for pid in workers)
        more = ["--resume"] if (out / "run.sqlite").exists() else []
    assert kills > 0
    last = started(case, out, *(["--resume"] if (out / "run.sqlite").exists() else []))
    resumed, errors = last.communicate(timeout=300)
    assert last.returncode == 1, errors
    assert answer(resumed) == answer(text)
