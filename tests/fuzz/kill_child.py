"""A fuzz run that a test kills: in a process that only calls `run`, without workers of its own.

`python kill_child.py DIRECTORY [--resume]`, or forked after an import. Every call of the kernel is noted in a
file beside the run, so that a test can count how often a case was really run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gdncheck.compare.fuzz import fuzz as fuzzing
from gdncheck.compare.fuzz import sitting, subject

KERNEL = "fuzz_kernels:long"
OPTIONS = {
    "shapes": ["1x1x8x8:bf16"], "max_tokens": 67, "families": ["exact"], "axes": {"split": ["at-63"]},
    "only": ["split"], "device": "cpu", "batch": 1, "cases": 4000, "shrink_seconds": 1.0,
    "confirm_seconds": 1.0,
}  # fmt: skip


def run(directory: Path, pool: type, *, resume: bool, seconds: float) -> None:
    """Fuzz until killed. pool: stands in for `WorkerPool`."""
    log = os.open(directory.parent / "calls.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    original = subject.Subject.job

    def noted(self, number, corpus):
        job = original(self, number, corpus)
        os.write(log, f"{number}\n".encode())
        return job

    subject.Subject.job = noted
    sitting.WorkerPool = pool
    sys.path.insert(0, str(Path(__file__).parent))
    fuzzing.fuzz(kernels=[KERNEL], out=directory, resume=resume, seconds=seconds, **OPTIONS)
