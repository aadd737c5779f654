"""Set up a runner: open the kernels, read the captures, and say what is left out before anything runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...capture.case import Case
from ...capture.casefile import hash_of, read_case
from ...capture.errors import BadInput, GdncheckError
from ...kernels.pool import KernelHandle, WorkerPool
from ..diff import verdict_device
from ..sweep.baseline import read_baseline
from .deviations import Axes
from .journal import Journal
from .lanes import Numbers
from .plan import Plan
from .runner import Flying
from .stock import Shape, Stockroom, capture_shape, shape_of, usable_captures
from .subject import Subject, default_shapes, limits_for

# Value heads of a capture that are kept: what a fault needs is there in one head, and the time is not.
MOST_HEADS = 4


class Ready(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Kernels that can fly, and what is not covered."""

    kernels: list[Flying]
    not_covered: list[dict[str, str]]
    """{kernel, what, reason}."""


def read_captures(places: Sequence[str | Path]) -> list[Path]:
    """Case files of directories and files, in order. Raises BadInput for one that is not there."""
    found: list[Path] = []
    for place in map(Path, places):
        if place.is_dir():
            files = sorted(place.glob("*.safetensors"))
            if not files:
                raise BadInput(
                    f"{place}: holds no *.safetensors; give a directory of captures, or leave --from"
                )
            found += files
        elif place.is_file():
            found.append(place)
        else:
            raise BadInput(f"--from {place}: no such file or directory")
    return found


def digests_of(paths: Sequence[Path]) -> list[str]:
    """Content of the captures, for the run's identity."""
    return [(case.content_hash or hash_of(case))[:16] for case in map(read_case, paths)]


def prepare(plan: Plan, workers: WorkerPool, journal: Journal, lanes: Sequence[int], *, asked: bool) -> Ready:
    """Open the kernels of a plan. asked: the user named them, so one that cannot be loaded raises."""
    given = {} if plan.baseline is None else read_baseline(plan.baseline)
    axes = Axes(plan.axes, plan.only, plan.excepted)
    captures, left = usable_captures([read_case(Path(p)) for p in plan.captures], MOST_HEADS)
    not_covered = [{"kernel": "*", "what": "capture", "reason": words} for words in left]
    environment = {} if plan.tune == "stock" else {"GDNCHECK_TUNE": plan.tune}
    if "OMP_NUM_THREADS" not in os.environ and verdict_device(plan.device) == "cpu":
        # Cases are small: a second thread of a CPU kernel only waits for the first.
        environment["OMP_NUM_THREADS"] = "1"
    handles = [workers.begin(name, environment=environment) for name in plan.kernels]
    ready = []
    for number, handle in enumerate(handles):
        try:
            flying = _flying(number, handle, plan, axes, given, captures, journal, lanes, not_covered)
        except GdncheckError as error:
            if asked:
                raise
            not_covered.append({"kernel": handle.spec.name, "what": "kernel", "reason": str(error)})
            continue
        ready.append(flying)
    return Ready(kernels=ready, not_covered=not_covered)


def _flying(
    number: int,
    handle: KernelHandle,
    plan: Plan,
    axes: Axes,
    given: dict[str, str],
    captures: list[Case],
    journal: Journal,
    lanes: Sequence[int],
    not_covered: list[dict[str, str]],
) -> Flying:
    info = handle.info
    limits, left = limits_for(info, plan.max_tokens, plan.families)
    name = info.name
    not_covered += [{"kernel": name, "what": f"family {f}", "reason": why} for f, why in left.items()]
    if limits.empties != "anywhere":
        where = "only at the end" if limits.empties == "end" else "none"
        not_covered.append(
            {"kernel": name, "what": "empty sequences", "reason": f"{where}: the contract says so"}
        )
    if limits.max_sequences == 1:
        not_covered.append({"kernel": name, "what": "packings", "reason": "it takes one sequence per call"})
    shapes = [shape_of(word) for word in plan.shapes or default_shapes(info)]
    shapes += [s for s in _shapes_of(captures) if s not in shapes]
    device = verdict_device(handle.device)
    subject = Subject(
        info,
        seed=plan.seed,
        stock=Stockroom(plan.seed, shapes, limits.max_tokens, captures),
        limits=limits,
        axes=axes,
        given=given,
        device=device,
    )
    return Flying(number, subject, handle, Numbers(journal, number, lanes, plan.cases_of(number)), plan)


def _shapes_of(captures: Sequence[Case]) -> list[Shape]:
    return list(dict.fromkeys(map(capture_shape, captures)))
