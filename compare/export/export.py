"""export: a directory with a stand-alone script, its tensors and the text of an upstream report.

The idea: whoever has to mend a kernel should need nothing but its own package: the script calls the kernel as
its adapter does, compares with the definition written out in it, and ends with 1 while the fault shows. The
kernel is run here first, so that what the report says was seen on this machine; the script is run too where
that is possible, and the report says how it ended.

Leaves to others: what the tensors are (`materials`), seeded values (`seeded`), the words (`upstream`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from ...capture.atomic import atomic_path
from ...capture.case import Case
from ...capture.casefile import read_case
from ...capture.errors import BadInput, CannotRun
from ...kernels.pool import KernelHandle, WorkerPool
from ...kernels.registry import parse_name
from ..diff import verdict_device
from ..finding import Facts, Finding, environment_for, facts_in, facts_of, find
from ..replay import STEADY_RUNS, is_same, runs_for
from ..shrink.candidate import Candidate
from ..shrink.oracle import Oracle
from ..shrink.reduce import checked_deviations, passing_path
from ..shrink.signature import fault_of, signature_of
from ..sweep.attempt import Attempt
from ..sweep.engine import run_setup
from ..verdict import FAILING
from . import materials, seeded, upstream
from .materials import Call, Seen, call_for
from .parts import declared, part_for
from .script import script_text
from .trying import folder_of, run_script

LOADING = 300.0  # seconds that a kernel may take to load
VALUES = ("exact", "seeded")
MOST_EXPECTED = 1 << 14  # entries of expected and seen results that are stored


class Exported(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What was written."""

    directory: Path
    files: tuple[str, ...]
    kernel: str
    facts: Facts
    values: str
    """`exact`, or `seeded` where the failure holds on seeded values."""
    note: str = ""
    """Why the values are not those that were asked for; what could not be run here."""
    script_status: int | None = None
    """Exit status of the script when it was run here, in a new process without gdncheck; None: not run."""
    seconds: float = 0.0
    command: str = ""

    @property
    def exit_status(self) -> int:
        """0 where the script shows the fault, or cannot be run here; 1 where it ran and did not show it."""
        return int(self.script_status not in (None, 1))


def export(
    case: Case | Path | str,
    out: Path | str,
    kernel: str | None = None,
    *,
    deviations: Mapping[str, str] | None = None,
    baseline: str | None = None,
    values: str = "exact",
    run: bool = True,
    passing: Case | None = None,
    original: bool = False,
    device: str = "auto",
    time_limit: float | None = None,
    seed: int | None = None,
    report: Callable[..., None] | None = None,
    command: str = "",
) -> Exported:
    """Write a script, tensors and a report for a finding.

    case: a case, its file, or `RUN/SIGNATURE`. out: a directory that is new or empty. values: `seeded` puts
    seeded tensors in place of the case's own, if the failure is the same on them. run: False: write without
    running the kernel here, by what the finding says. passing: a case that passes, in place of the one that
    is kept with the finding. The rest as for replay.
    Raises BadInput where the kernel does not fail on it, or the failure cannot be said without gdncheck.
    """
    started = time.monotonic()
    if values not in VALUES:
        raise BadInput(f"values is {values!r}; use {' or '.join(VALUES)}")
    directory = Path(out)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise BadInput(f"{directory}: is not empty; choose another -o")
    finding = find(case, original=original)
    if passing is not None:
        finding = msgspec.structs.replace(finding, neighbour=passing)
    name = kernel or finding.facts.kernel
    if not name:
        raise BadInput(f"{finding.name}: says no kernel that fails on it; name one with --kernel")
    facts = finding.facts
    chosen = checked_deviations(facts.deviations if deviations is None else deviations)
    say = report or (lambda *words: None)
    with WorkerPool(device=device, time_limit=max(time_limit or facts.time_limit, LOADING)) as workers:
        job = _Job(
            finding, name, chosen, baseline or facts.baseline, facts.seed if seed is None else seed,
            time_limit or facts.time_limit, verdict_device(device), say,
        )  # fmt: skip
        job.look(workers if run else None)
        if values == "seeded":
            job.replace_values()
        files = job.write(directory)
    status = job.try_script(directory)
    job.write_report(directory, status)
    return Exported(
        directory=directory,
        files=(*files, "report.md"),
        kernel=job.info.name,
        facts=job.facts,
        values="exact" if job.seed_used is None else "seeded",
        note="; ".join(job.notes),
        script_status=status,
        seconds=time.monotonic() - started,
        command=command,
    )


class _Job:
    """One export."""

    def __init__(
        self, finding: Finding, kernel: str, deviations: dict[str, str], baseline: str | None, seed: int,
        time_limit: float, verdict_device: str, say: Callable[..., None],
    ) -> None:  # fmt: skip
        self.finding, self.kernel, self.deviations = finding, kernel, deviations
        self.baseline, self.seed, self.time_limit = baseline, seed, time_limit
        self.verdict_device, self.say = verdict_device, say
        self.notes: list[str] = []
        self.seed_used: int | None = None
        self.oracle: Oracle | None = None
        self.attempt: Attempt | None = None
        self.case = finding.case

    # --- the kernel

    def look(self, workers: WorkerPool | None) -> None:
        """Run the kernel until it fails as was kept; where it cannot run here, go by what was kept.

        workers: None: do not run it.
        """
        try:
            if workers is None:
                raise CannotRun("as was asked for")
            handle = workers.open(self.kernel, environment=environment_for(self.finding.facts))
        except CannotRun as error:
            self.info = declared(self.kernel, error)
            if not self.finding.facts.kernel:
                raise
            self.notes.append(f"the kernel was not run here: {error}")
            self.facts = self.finding.facts
            self._prepare()
            return
        self.info = handle.info
        self._check_relation()
        self.oracle = Oracle(
            workers, handle, self.case, verdict_device=self.verdict_device, seed=self.seed,
            time_limit=self.time_limit, baseline=self.baseline,
        )  # fmt: skip
        self._prepare()
        self.attempt = self._failing()
        self._measure(handle)

    def _check_relation(self) -> None:
        relation = self.finding.facts.relation
        if relation and relation != "run-to-run" and not self.deviations:
            raise BadInput(
                f"{self.finding.name}: only the relation {relation} shows it, by a second call that a script "
                "without gdncheck does not make; send the case file with the command of gdncheck replay"
            )

    def _prepare(self) -> None:
        """The call, its text and the passing one; anything that cannot be said raises here."""
        self.call = call_for(self.case, self.deviations, self.info, baseline=self.baseline, seed=self.seed)
        self.part = part_for(self.kernel, self.info, self.call)
        self.passing = self._passing()

    def _passing(self) -> Call | None:
        """The nearest passing case: kept in the store, or beside the file."""
        case = self.finding.neighbour
        path = passing_path(Path(self.finding.name))
        if case is None and path.is_file():
            case = read_case(path)
        if case is None:
            return None
        facts = facts_in(case)
        deviations = self.deviations if facts is None else facts.deviations
        try:
            return call_for(case, deviations, self.info, baseline=self.baseline, seed=self.seed)
        except BadInput as error:
            self.notes.append(f"the passing neighbour is left out: {error}")
            return None

    def _failing(self) -> Attempt:
        """A run that fails as was kept."""
        assert self.oracle is not None
        candidate = Candidate(self.case, self.deviations)
        other: Attempt | None = None
        failures = runs = 0
        found: Attempt | None = None
        most = runs_for(self.finding.facts)
        while runs < most:
            self.say(f"{self.info.name}: run {runs + 1} of {most}", runs, most)
            attempt = self.oracle.see(candidate, fully=True, full_limit=True)
            same = attempt.verdict in FAILING and is_same(self.finding, attempt, self.oracle.chunk_size)
            runs, failures = runs + 1, failures + same
            found, other = (attempt, other) if same else (found, attempt)
            if same and (attempt.verdict in ("timeout", "error") or runs >= STEADY_RUNS):
                break
        if found is None:
            assert other is not None
            raise BadInput(
                f"{self.finding.name}: {self.info.name} does not fail on it as was kept: {other.verdict} in "
                f"{runs} runs ({other.reason}); nothing was written"
            )
        fault = fault_of(found, self.oracle.chunk_size)
        assert fault is not None
        known = self.finding.facts
        digest = known.signature or signature_of(found, self.info, self.oracle.chunk_size).digest
        counted = (failures, runs)
        if known.runs and known.kernel == self.info.name:
            counted = (known.failures or 0, known.runs)
        self.facts = facts_of(
            self.info, found, kind=fault.kind, signature=digest, place_pattern=fault.pattern,
            deviations=self.deviations, baseline=self.baseline, failures=counted[0], runs=counted[1],
            seed=self.seed, tune=known.tune, time_limit=self.time_limit, history=known.history,
        )  # fmt: skip
        return found

    def _measure(self, handle: KernelHandle) -> None:
        """The outputs of a failing run; several where it comes and goes."""
        self.seen = materials.seen(self.call, self.info, None)
        if self.facts.kind in ("error", "crash", "timeout"):
            return
        for _ in range(runs_for(self.finding.facts)):
            ran = run_setup(handle, self.call.setup, self.info)
            found = materials.seen(self.call, self.info, ran if ran.status == "ok" else None)
            if self.seen.got is None or found.error > self.seen.error:
                self.seen = found
            if self._is_bad(found):
                self.seen = found
                return

    def _is_bad(self, found: Seen) -> bool:
        if self.facts.kind == "nonfinite":
            return found.got is not None and not all(bool(torch.isfinite(x).all()) for x in found.got)
        return False

    # --- values

    def replace_values(self) -> None:
        """Seeded tensors, if the kernel fails on them in the same way."""
        if self.oracle is None:
            known = self.case.origin
            if known.note == seeded.NOTE and known.seed is not None:
                self.seed_used, self.recipes = known.seed, seeded.recipes_of(self.case)
                if seeded.is_of(self.case, self.recipes, known.seed):
                    return
                self.seed_used = None
            self.notes.append("values are exact: the kernel cannot be run here, so no seed could be tried")
            return
        oracle, wanted = self.oracle, fault_of(self.attempt, self.oracle.chunk_size)  # type: ignore[arg-type]
        assert wanted is not None
        runs = runs_for(self.facts)

        def fails(case: Case) -> bool:
            self.say("trying seeded values")
            if oracle.soundness(case).sound != oracle.soundness(self.case).sound:
                return False
            candidate = Candidate(case, self.deviations)
            return any(
                wanted.matches(fault_of(oracle.see(candidate, fully=True), oracle.chunk_size))
                for _ in range(runs)
            )

        found = next(seeded.find_seed(self.case, fails), None)
        if found is None:
            self.notes.append(f"values are exact: on {seeded.SEEDS} seeds the failure is not the same")
            return
        self.seed_used, self.case = found
        self.recipes = seeded.recipes_of(materials.as_called(self.finding.case))
        self.call = call_for(self.case, self.deviations, self.info, baseline=self.baseline, seed=self.seed)
        # Its neighbour is of the other values, and would show them.
        self.passing = None
        self._measure(oracle.limited.handle)

    @property
    def drawn(self) -> bool:
        """Whether the script draws the tensors itself: the call's case is the seeded one, unchanged."""
        return self.seed_used is not None and self.call.unchanged_from(self.case)

    # --- files

    def write(self, directory: Path) -> list[str]:
        """The script and its tensors."""
        if not hasattr(self, "seen"):
            self.seen = materials.seen(self.call, self.info, None)
        self.limit = self._limit()
        keep = not parse_name(self.kernel).family
        tensors = {} if self.drawn else self.call.tensors("failing", keep_flags=keep)
        if self.passing is not None:
            tensors |= self.passing.tensors("passing", keep_flags=keep)
        for prefix, pair in (("expected", self.seen.expected), ("seen", self.seen.got)):
            # The script computes what is expected; a large copy of it helps nobody.
            if pair is not None and pair[0].numel() + pair[1].numel() <= MOST_EXPECTED:
                tensors |= {
                    f"{prefix}.{name}": x.cpu().contiguous().clone()
                    for name, x in zip(("output", "final_state"), pair, strict=True)
                }
        directory.mkdir(parents=True, exist_ok=True)
        if tensors:
            with atomic_path(directory / "tensors.safetensors") as path:
                save_file(tensors, path)
        text = script_text(self)
        with atomic_path(directory / "repro.py") as path:
            path.write_text(text, encoding="utf-8")
        return ["repro.py", *(["tensors.safetensors"] if tensors else [])]

    def _limit(self) -> float:
        if self.facts.kind != "wrong":
            return float("inf") if self.facts.kind != "nonfinite" else 0.1
        if self.seen.got is None:
            return 0.1  # not run here
        ratio = None if self.attempt is None else self.attempt.margins.ratio
        return materials.limit_for(self.seen, self.call, self.info, ratio, 6.0)

    def try_script(self, directory: Path) -> int | None:
        """Run the script in a new process that cannot see gdncheck; None where that is not possible here."""
        if self.part.needs_gpu and not torch.cuda.is_available():
            self.notes.append("the script needs a GPU and was not run here")
            return None
        if self.oracle is None:
            return None
        self.say("running the script in a new process")
        status, self.printed = run_script(directory, folder_of(self.oracle.limited.spec))
        if status is None:
            self.notes.append("the script did not end in time")
        if status == 2:
            self.notes.append(
                f"the script cannot run here: {' '.join(self.printed.strip().splitlines()[-1:])}"
            )
            return None
        return status

    def write_report(self, directory: Path, status: int | None) -> None:
        with atomic_path(directory / "report.md") as path:
            path.write_text(upstream.report_text(self, status), encoding="utf-8")
