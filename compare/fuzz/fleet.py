"""Several runners: a process per device and job, each with lanes of its own and all with one store.

The idea: what a runner does depends on its lanes only, so any number of them make the cases that one would.
The parent holds the run's lock, hands it on to them (it is free once the last of them is gone), tells what
they tell, and judges nothing. A runner that dies costs what it had in flight; the others go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from ...capture.errors import BadInput, CannotRun, GdncheckError
from ...kernels.process import child_command
from ..store import RunStore
from .lanes import lanes_of
from .plan import Plan
from .runner import Tell

GRACE = 30.0  # seconds that runners get to end by themselves


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner is told on its standard input, on one line."""

    plan: Plan
    directory: str
    lanes: tuple[int, ...]
    seconds: float | None
    asked: bool
    search_path: tuple[str, ...]
    """Where kernels given by import path may lie: the parent's sys.path."""
    first: bool
    """Takes up findings of an earlier sitting that nobody has confirmed."""


def devices_for(device: str) -> list[str]:
    """GPUs that a run uses, by number; one nameless device where it runs on the CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return [""]
    return [str(i) for i in range(torch.cuda.device_count())]


class _Child:
    """One runner's process."""

    def __init__(self, orders: Orders, device: str, lock: int | None) -> None:
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        if device:
            seen = environment.get("CUDA_VISIBLE_DEVICES")
            environment["CUDA_VISIBLE_DEVICES"] = seen.split(",")[int(device)] if seen else device
        self.lanes, self.device = orders.lanes, device
        self.process = subprocess.Popen(
            child_command("gdncheck.compare.fuzz.runner_process"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True,
            pass_fds=() if lock is None else (lock,),
        )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(orders) + b"\n")
        # Kept open: a runner whose standard input ends knows that its parent is gone.
        self.process.stdin.flush()
        self.unread = b""
        self.error: dict[str, Any] | None = None
        self.not_covered: list[dict[str, str]] = []

    def interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def run_fleet(
    plan: Plan, store: RunStore, deadline: float, tell: Tell, *, devices: list[str], jobs: int, asked: bool
) -> list[dict[str, str]]:
    """Run the lanes of the plan's shard in several processes until they are done; what was not covered."""
    lanes = lanes_of(plan.shard)
    n_runners = min(len(lanes), len(devices) * jobs)
    left = deadline - time.monotonic()
    children: list[_Child] = []
    try:
        for number in range(n_runners):
            orders = Orders(
                plan=plan, directory=str(store.directory.resolve()), lanes=lanes[number::n_runners],
                seconds=None if left == float("inf") else left, asked=asked, first=number == 0,
                search_path=tuple(os.path.abspath(entry) for entry in sys.path if os.path.isdir(entry)),
            )  # fmt: skip
            children.append(_Child(orders, devices[number % len(devices)], store.lock_descriptor))
        try:
            _listen(children, tell)
        except KeyboardInterrupt:
            for child in children:
                child.interrupt()
            _listen(children, tell, until=time.monotonic() + GRACE)
            raise
    finally:
        for child in children:
            child.kill()
    return _outcome(children)


def _listen(children: list[_Child], tell: Tell, until: float = float("inf")) -> None:
    """Pass on what runners tell until all of them have ended."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            assert child.process.stdout is not None
            if not child.process.stdout.closed:
                selector.register(child.process.stdout, selectors.EVENT_READ, child)
        while selector.get_map() and time.monotonic() < until:
            for key, _ in selector.select(0.5):
                child = key.data
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(child.process.stdout)
                    continue
                *complete, child.unread = (child.unread + data).split(b"\n")
                for line in complete:
                    _heard(child, line, tell)
            tell("tick", {})


def _heard(child: _Child, line: bytes, tell: Tell) -> None:
    try:
        said = json.loads(line)
    except ValueError:
        return  # a library printed to standard output
    if said["event"] == "error":
        child.error = said["data"]
    elif said["event"] == "end":
        child.not_covered = said["data"]["not_covered"]
    else:
        tell(said["event"], said["data"])


def _outcome(children: list[_Child]) -> list[dict[str, str]]:
    """What was not covered; raises what the runners raised, if all of them did."""
    failed = [child for child in children if child.error is not None or child.process.returncode]
    if len(failed) == len(children):
        error = next((c.error for c in failed if c.error is not None), None)
        if error is None:
            raise CannotRun(
                f"every runner died (exit status {failed[0].process.returncode}); go on with --resume"
            )
        kinds: dict[str, type[GdncheckError]] = {"BadInput": BadInput, "CannotRun": CannotRun}
        raise kinds.get(error["kind"], CannotRun)(error["message"])
    found = list(_distinct(row for child in children for row in child.not_covered))
    for child in failed:
        why = child.error["message"] if child.error else f"died, exit status {child.process.returncode}"
        where = f"GPU {child.device}, " if child.device else ""
        numbers = ", ".join(map(str, child.lanes))
        found.append({"kernel": "*", "what": f"{where}lanes {numbers}", "reason": f"runner {why}"})
    return found


def _distinct(rows: Iterator[dict[str, str]]) -> Iterator[dict[str, str]]:
    seen: set[tuple[str, ...]] = set()
    for row in rows:
        if tuple(row.values()) not in seen:
            seen.add(tuple(row.values()))
            yield row


def runner_count(jobs: int | None, devices: list[str]) -> int:
    """Runners per device, where the user names no number: several share a GPU, which small launches idle."""
    if jobs is not None:
        return jobs
    if devices == [""]:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, min(4, cores // (3 * len(devices))))
