"""Processes that run at the same time, each with a log of JSON lines, until the time is up.

The one idea: whatever ends a run, what a log holds was measured; so a child writes and flushes a line at a
time, and a reader drops a last line that was cut.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from record import machine, versions

GRACE = 5.0  # seconds between the time at which children stop by themselves and ending them


def run_side_by_side(
    commands: Mapping[str, list[str]], folder: Path, until: float, facts: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Start every command, wait for them or for `until` (of time.time), and end what is left.

    What a child says goes to FOLDER/NAME.txt; facts, and those of the machine, to FOLDER/run.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = {"versions": versions(), "machine": machine(), **facts}
    (folder / "run.json").write_text(json.dumps(known, indent=2) + "\n")
    children = {}
    for name, command in commands.items():
        said = (folder / f"{name}.txt").open("a")
        # A group of its own: its workers end with it.
        children[name] = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )  # fmt: skip
    try:
        for child in children.values():
            child.wait(max(0.1, until + GRACE - time.time()))
    except subprocess.TimeoutExpired:
        print("the time is up", flush=True)
    finally:
        for child in children.values():
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def lines_of(log: Path) -> list[dict[str, Any]]:
    """What a log holds; none where there is no log, and a last line that was cut is dropped."""
    found = []
    for text in log.read_text().splitlines() if log.exists() else ():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found
