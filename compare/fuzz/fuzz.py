"""fuzz: seeded cases without end, judged as `diff` judges; the twin of `gdncheck fuzz`.

The idea: a run is a directory. What is in it decides what comes next, so that a run that was killed, stopped
or sent to another machine goes on where it was; the report is read from it too, and says what was not
covered.
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...capture.errors import BadInput, CannotRun
from ...capture.make import FAMILIES
from ...kernels.registry import default_kernels
from ..store import RunStore
from .deviations import Axes
from .fleet import devices_for, run_fleet, runner_count
from .journal import Journal
from .lanes import LANES, lanes_of
from .merge import ID
from .plan import Plan
from .report import FuzzReport, progress_of, report_of
from .runner import Tell
from .setup import digests_of, read_captures
from .sitting import sit
from .stock import shape_of

DEFAULT_SECONDS = 600.0
TUNES = ("never", "stock")
TICK = 0.5  # seconds between two looks at how far the run is


def fuzz(
    *,
    kernels: Sequence[str] | None = None,
    seconds: float | None = None,
    cases: int | None = None,
    captures: Sequence[Path | str] = (),
    axes: Mapping[str, Sequence[str]] | None = None,
    only: Sequence[str] = (),
    excepted: Sequence[str] = (),
    baseline: str | Path | None = None,
    shapes: Sequence[str] = (),
    families: Sequence[str] = (),
    max_tokens: int | None = None,
    tune: str = "never",
    batch: int = 32,
    jobs: int | None = None,
    shard: tuple[int, int] = (1, 1),
    device: str = "auto",
    time_limit: float = 120.0,
    confirm_seconds: float = 120.0,
    shrink_seconds: float = 120.0,
    seed: int = 0,
    strict: bool = False,
    out: Path | str | None = None,
    resume: bool = False,
    progress: Tell | None = None,
    command: str = "",
) -> FuzzReport:
    """Fuzz kernels until the time or the cases are used up; Ctrl-C ends it with the report of what there is.

    seconds: None: 600, or without end where `cases` is given. cases: of all kernels together, in this run.
    captures: case files, or directories of them, to cut cases from. axes, only, excepted: as `sweep`.
    shapes: `HKxHVxKxV:dtype`. families: synthetic ones to draw from. tune: `never` or `stock`. batch: cases
    in flight at most; 1 loses one case to a kill at most. jobs: runners per device. shard: (i, n), i from 1.
    time_limit: seconds for a process's first call. confirm_seconds, shrink_seconds: for each finding. out:
    the run's directory; without it nothing is kept. progress: told (event, data). Raises BadInput for a wrong
    argument, file or name; CannotRun where nothing could run.
    """
    started = time.monotonic()
    plan = _plan(
        kernels=kernels, cases=cases, captures=captures, axes=axes, only=only, excepted=excepted,
        baseline=baseline, shapes=shapes, families=families, max_tokens=max_tokens, tune=tune, batch=batch,
        shard=shard, device=device, time_limit=time_limit, confirm_seconds=confirm_seconds,
        shrink_seconds=shrink_seconds, seed=seed,
    )  # fmt: skip
    seconds = _seconds(seconds, cases)
    if resume and out is None:
        raise BadInput("resume needs the run's directory: add --out DIR")
    tell = progress or (lambda event, data: None)
    with (
        _directory(out) as directory,
        RunStore.open(
            directory, parameters=plan.identity(digests_of([Path(p) for p in plan.captures])), resume=resume
        ) as store,
    ):
        store.remember("command", command)
        if store.recall(ID) is None:
            store.remember(ID, uuid.uuid4().hex)
        deadline = started + seconds
        devices = devices_for(plan.device)
        each = runner_count(jobs, devices)
        tell = _with_progress(tell, store)
        stopped = "time" if seconds != float("inf") else "cases"
        not_covered: list[dict[str, str]] = []
        try:
            if each * len(devices) == 1:
                not_covered = _run_here(plan, store, deadline, tell, asked=bool(kernels))
            else:
                not_covered = run_fleet(
                    plan, store, deadline, tell, devices=devices, jobs=each, asked=bool(kernels)
                )
        except KeyboardInterrupt:
            stopped = "interrupted"
        not_covered = not_covered or store.recall("not_covered") or []
        return report_of(
            store, plan, seconds=time.monotonic() - started, stopped=stopped, not_covered=not_covered,
            strict=strict, command=command, kept=out is not None,
        )  # fmt: skip


def _run_here(
    plan: Plan, store: RunStore, deadline: float, tell: Tell, *, asked: bool
) -> list[dict[str, str]]:
    """One runner, in this process."""
    return sit(plan, store, lanes_of(plan.shard), deadline, tell, asked=asked, first=True)


def _with_progress(tell: Tell, store: RunStore) -> Tell:
    """Tell how far the run is now and then, from its store: whatever number of runners writes to it."""
    journal, told = Journal(store), [0.0]

    def both(event: str, data: dict[str, Any]) -> None:
        tell(event, data)
        if event == "tick" and time.monotonic() - told[0] >= TICK:
            told[0] = time.monotonic()
            tell("progress", progress_of(store, journal))

    return both


def _plan(**given: Any) -> Plan:
    """Check the arguments at the door."""
    names = list(given.pop("kernels") or default_kernels())
    if not names:
        raise CannotRun("no kernel is installed; name one with --kernel, or see gdncheck doctor")
    if len(set(names)) < len(names):
        raise BadInput("a kernel is named twice; name each once")
    cases, shard, baseline = given["cases"], given["shard"], given.pop("baseline")
    if cases is not None and cases < 1:
        raise BadInput(f"cases is {cases}; give 1 or more")
    if not (1 <= shard[0] <= shard[1] <= LANES):
        raise BadInput(f"shard is {shard[0]}/{shard[1]}; give i/n with 1 <= i <= n <= {LANES}")
    for name, least in (("batch", 1), ("max_tokens", 1)):
        if given[name] is not None and given[name] < least:
            raise BadInput(f"{name} is {given[name]}; give {least} or more")
    for name in ("time_limit", "confirm_seconds", "shrink_seconds"):
        if not given[name] > 0:
            raise BadInput(f"{name} is {given[name]}; give seconds above 0")
    if given["tune"] not in TUNES:
        raise BadInput(f"tune is {given['tune']!r}; use {' or '.join(TUNES)}")
    unknown = [f for f in given["families"] if f not in FAMILIES]
    if unknown:
        raise BadInput(f"family {unknown[0]!r} is unknown; families: {', '.join(FAMILIES)}")
    for word in given["shapes"]:
        shape_of(word)
    axes = {name: tuple(values) for name, values in (given.pop("axes") or {}).items()}
    Axes(axes, given["only"], given["excepted"])
    paths = tuple(str(p) for p in read_captures(given.pop("captures")))
    tuples: dict[str, Any] = {
        name: tuple(given.pop(name)) for name in ("only", "excepted", "shapes", "families")
    }
    return Plan(
        kernels=tuple(names), captures=paths, axes=axes,
        baseline=None if baseline is None else str(baseline), **tuples, **given,
    )  # fmt: skip


def _seconds(seconds: float | None, cases: int | None) -> float:
    if seconds is None:
        return DEFAULT_SECONDS if cases is None else float("inf")
    if not seconds > 0:
        raise BadInput(f"the time is {seconds} s; give more than 0")
    return seconds


@contextmanager
def _directory(out: Path | str | None) -> Iterator[Path]:
    """The run's directory; one that goes away again where none was asked for."""
    if out is not None:
        yield Path(out)
        return
    with tempfile.TemporaryDirectory(prefix=f"gdncheck-fuzz-{os.getpid()}-") as place:
        yield Path(place)
