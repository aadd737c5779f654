"""kill -9: the store opens, no finding is lost, and no case is run twice but the one in flight."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from pathlib import Path

import torch
from gdncheck.capture.casefile import read_case
from gdncheck.compare.store import FILE_NAME, RunStore

KILLS = 10
PATIENCE = 60.0  # seconds; a busy machine is not to fail the test


def _module(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def calls_of(directory):
    """Numbers of the cases that were drawn, in order."""
    log = directory.parent / "calls.log"
    return [int(n) for n in log.read_text().split()] if log.exists() else []


def killed_after(directory, pool, more, seconds):
    """Run in a forked process, killed so long after `more` further cases; whether it was still running."""
    before = len(calls_of(directory))
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        status = 1
        try:
            resume = (directory / FILE_NAME).exists()
            _module("kill_child").run(directory, pool, resume=resume, seconds=600.0)
            status = 0
        finally:
            os._exit(status)
    give_up = time.monotonic() + PATIENCE
    while len(calls_of(directory)) < before + more and time.monotonic() < give_up:
        time.sleep(0.005)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def findings_of(directory):
    """Signatures, and that each has a case file that reads."""
    with RunStore.read(directory) as store:
        rows = store.finding_rows()
        for row in rows:
            read_case(store.case_path(row.case_file))
        aliases = dict(store.execute("SELECT raw, signature FROM aliases").fetchall())
    return {row.signature for row in rows}, aliases


def test_a_kill_loses_a_finding_or_runs_a_case_twice(tmp_path, pool_inside):
    directory = tmp_path / "run"
    dice = random.Random(5)
    known = set()
    seen = 0
    for _ in range(KILLS):
        assert killed_after(directory, pool_inside, dice.randrange(8), dice.uniform(0.0, 0.15))
        if not (directory / FILE_NAME).exists():
            continue
        connection = sqlite3.connect(directory / FILE_NAME)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        if "cases" not in tables:
            continue
        verdicts = Counter(v for (v,) in connection.execute("SELECT verdict FROM cases"))
        # One case is in flight at most; those of earlier kills are not met again.
        assert verdicts["alone"] + verdicts["started"] <= 1
        assert sum(verdicts.values()) >= seen
        seen = sum(verdicts.values())
        connection.close()
        now, aliases = findings_of(directory)
        # A finding may have got its final name since, but it is there under one.
        assert all(signature in now or aliases.get(signature) in now for signature in known)
        known = now
    assert seen > 20
    assert known
    calls = Counter(calls_of(directory))
    twice = [n for n, count in calls.items() if count > 1]
    assert twice == [], "a case was run again"
    assert max(calls) + 1 - len(calls) <= KILLS
