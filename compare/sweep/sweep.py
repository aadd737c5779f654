"""sweep: which configuration first gives a non-finite or a wrong result; the twin of `gdncheck sweep`.

The idea: one loop over cases and kernels; for each, a baseline, a plan of changes, a search in order and the
first failure of each kind explained. Everything that is found is a value of the report; printing is
`report`'s, and what an axis is `compare.axes`'.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...capture.case import Case
from ...capture.casefile import read_case
from ...capture.directory import cases_of_layer
from ...capture.errors import BadInput, CannotRun, GdncheckError
from ...kernels.pool import KernelHandle, WorkerPool
from ...kernels.registry import default_kernels
from ..axes.axis import Situation
from ..cut import first_tokens
from ..diff import verdict_device
from ..store import RunStore
from ..tunings import TUNED_AT, TuningAccount
from ..verdict import VERDICT_ORDER, VerdictWord, exit_status_of
from .attempt import Attempt
from .baseline import baseline_for, read_baseline
from .configuration import Configuration
from .explain import Finding, as_document, findings_of
from .judging import Judge, digest
from .kernel_runs import KernelRuns
from .plan import DEPTHS, Choice, choice_of, plan_of
from .search import Say, Search
from .tuning import Wish, account_of, wish_of


class KernelSweep(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep of one kernel on one case found."""

    kernel: str
    case: str
    layer: int | None = None
    tokens: int = 0
    baseline: Configuration = {}
    changes: dict[str, list[str]] = {}
    """Axis -> values that were to be tried."""
    attempts: tuple[Attempt, ...] = ()
    findings: tuple[Finding, ...] = ()
    not_covered: tuple[dict[str, str], ...] = ()
    """{axis, value, reason}."""
    untried: int = 0
    """Configurations that the budget did not reach."""
    tuning: TuningAccount | None = None
    """The tuners that the baseline's call passed, and what fresh tunings drew."""
    skipped: str = ""
    """Why nothing was tried at all."""
    seconds: float = 0.0

    def finding(self, kind: str) -> Finding | None:
        return next((f for f in self.findings if f.kind == kind), None)


class SweepReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a sweep found out."""

    verdict: VerdictWord
    sweeps: tuple[KernelSweep, ...]
    depth: str = "1"
    strict: bool = False
    seconds: float = 0.0
    command: str = ""

    @property
    def tried(self) -> int:
        """Configurations that were run, confirmations and what was refused at once left out."""
        return sum(a.verdict != "skipped" for s in self.sweeps for a in s.attempts)

    @property
    def exit_status(self) -> int:
        """0, 1 or 3 of the design."""
        attempts = [a for s in self.sweeps for a in s.attempts]
        named = any(a.contract_differences for a in attempts)
        return exit_status_of((a.verdict for a in attempts), strict=self.strict, differences=named)


def sweep(
    case: Case | Path | str | None = None,
    *,
    kernels: Sequence[str] | None = None,
    layer: int | None = None,
    captures: Path | str = "captures",
    first: int | None = None,
    axes: Mapping[str, Sequence[str]] | None = None,
    only: Sequence[str] = (),
    excepted: Sequence[str] = (),
    baseline: str | Path | None = None,
    depth: str = "1",
    pin_runs: int | None = None,
    tunings: int = 0,
    tuned_at: Sequence[int] = TUNED_AT,
    budget: float | None = None,
    device: str = "auto",
    time_limit: float = 300.0,
    seed: int = 0,
    strict: bool = False,
    out: Path | str | None = None,
    resume: bool = False,
    progress: Say | None = None,
    command: str = "",
) -> SweepReport:
    """Try configurations of kernels on a case, or on every captured call of a layer, fewest deviations first.

    axes: {axis: values} in place of the table's. only, excepted: axes. baseline: a shipped name or a file.
    depth: 1 (single changes), 2 (pairs, by a covering array) or full. pin_runs: runs of every autotune pin
    (None: 5 on a GPU, 1 in the interpreter). tunings: fresh tunings, counted at each length of `tuned_at` and
    at the case's own (a GPU is needed). budget: seconds after which no new configuration is begun. out: a
    directory that results are written to as they come; resume: go on there.
    Raises BadInput for a wrong argument, file or name; CannotRun where nothing could run.
    """
    started = time.monotonic()
    choice = _checked(axes, only, excepted, depth, budget, first, out, resume)
    wish = wish_of(choice, pin_runs, tunings, tuned_at)
    given = {} if baseline is None else read_baseline(str(baseline))
    names = list(kernels) if kernels else default_kernels()
    if not names:
        raise CannotRun("no kernel is installed; name one with --kernel, or see gdncheck doctor")
    cases = list(_cases(case, layer, captures, first))
    judge = Judge(verdict_device(device), seed)
    deadline = float("inf") if budget is None else started + budget
    found = []
    with (
        _store(out, resume, cases, seed, device, pin_runs) as store,
        WorkerPool(device=device, time_limit=time_limit) as pool,
    ):
        handles = [pool.begin(name) for name in names]
        for one in cases:
            for handle in handles:
                job = _Job(
                    pool, handle, one, given, choice, wish, judge, seed, depth, deadline, store, progress
                )  # fmt: skip
                found.append(job.run(asked=bool(kernels)))
    words = {a.verdict for s in found for a in s.attempts} or {"skipped"}
    verdict: VerdictWord = next(word for word in VERDICT_ORDER if word in words)
    return SweepReport(
        verdict=verdict,
        sweeps=tuple(found),
        depth=depth,
        strict=strict,
        seconds=time.monotonic() - started,
        command=command,
    )


def _checked(
    axes: Mapping[str, Sequence[str]] | None,
    only: Sequence[str],
    excepted: Sequence[str],
    depth: str,
    budget: float | None,
    first: int | None,
    out: Path | str | None,
    resume: bool,
) -> Choice:
    """Arguments at the door."""
    if depth not in DEPTHS:
        raise BadInput(f"depth is {depth!r}; use {', '.join(DEPTHS)}")
    if budget is not None and not budget > 0:
        raise BadInput(f"budget is {budget}; give seconds above 0")
    if first is not None and first < 1:
        raise BadInput(f"first is {first}; give 1 or more tokens")
    if resume and out is None:
        raise BadInput("resume needs the run's directory: add --out DIR")
    return choice_of(axes or {}, only, excepted)


def _cases(
    case: Case | Path | str | None, layer: int | None, captures: Path | str, first: int | None
) -> Iterator[Case]:
    """The case, or the layer's calls in order."""
    if case is not None and layer is not None:
        raise BadInput(f"give a case or --layer {layer}, not both")
    if case is None and layer is None:
        raise BadInput("name what to sweep: a CASE file, or --layer N of the captures")
    found: Iterator[Case]
    if layer is not None:
        found = (read_case(path) for path in cases_of_layer(captures, layer))
    else:
        found = iter([case if isinstance(case, Case) else read_case(Path(str(case)))])
    for one in found:
        yield first_tokens(one, first) if first is not None else one


class _NoStore:
    """Without --out nothing is written."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


def _store(
    out: Path | str | None, resume: bool, cases: list[Case], seed: int, device: str, pin_runs: int | None
) -> RunStore | _NoStore:
    if out is None:
        return _NoStore()
    parameters = {
        "what": "sweep", "cases": [digest(c) for c in cases], "seed": seed, "device": device,
        **({} if pin_runs is None else {"pin_runs": pin_runs}),
    }  # fmt: skip
    return RunStore.open(out, parameters=parameters, resume=resume)


class _Job(msgspec.Struct, frozen=True):
    """One kernel on one case."""

    pool: WorkerPool
    handle: KernelHandle
    case: Case
    given: dict[str, str]
    choice: Choice
    wish: Wish
    judge: Judge
    seed: int
    depth: str
    deadline: float
    store: RunStore | None
    progress: Say | None

    def run(self, *, asked: bool) -> KernelSweep:
        """Sweep; a kernel that nobody named may be missing or too slow: it is skipped with the reason."""
        started = time.monotonic()
        try:
            info = self.handle.info
        except GdncheckError as error:
            if asked:
                raise
            return self._skipped(self.handle.spec.name, str(error))
        limit = info.capabilities.max_tokens_cpu
        if (
            not asked
            and limit is not None
            and info.environment.get("interpreted")
            and self.case.n_tokens > limit
        ):
            reason = f"{self.case.n_tokens} tokens are slow in Triton's interpreter (limit {limit})"
            return self._skipped(info.name, f"{reason}; name it with --kernel, or add --first {limit}")
        situation = Situation(case=self.case, info=info, seed=self.seed)
        baseline, left = baseline_for(self.given, situation)
        runs = KernelRuns(
            self.pool, self.handle, situation, baseline, self.judge, pin_runs=self.wish.pin_runs
        )
        if self.choice.takes("autotune"):
            runs = runs.with_evidence()
        plan = plan_of(self.choice, runs.situation, baseline)
        search = Search(
            runs,
            plan,
            case_digest=digest(self.case),
            store=self.store,
            deadline=self.deadline,
            say=self.progress,
        )
        search.run(self.depth)
        if self.progress is not None and any(a.failed for a in search.attempts):
            self.progress(f"{info.name}: confirming and reducing what failed", 0, None)
        findings = findings_of(search)
        for finding in findings:
            if self.store is not None:
                signature = finding.signature(info.version, runs.warm_setup.chunk_size)
                self.store.add_finding(signature, as_document(finding))
        tuning = None
        if self.choice.takes("autotune"):
            tuning = account_of(
                runs, self.wish, case_digest=search.case_digest, store=self.store,
                deadline=self.deadline, say=self.progress,
            )  # fmt: skip
        return KernelSweep(
            kernel=info.name,
            case=self._name,
            layer=self.case.origin.layer,
            tokens=self.case.n_tokens,
            baseline=baseline,
            changes=plan.changes,
            attempts=tuple(search.attempts),
            findings=tuple(findings),
            not_covered=(*left, *plan.not_covered),
            untried=search.untried,
            tuning=tuning,
            seconds=time.monotonic() - started,
        )

    @property
    def _name(self) -> str:
        return str(self.case.path) if self.case.path is not None else self.case.label

    def _skipped(self, kernel: str, reason: str) -> KernelSweep:
        return KernelSweep(kernel=kernel, case=self._name, layer=self.case.origin.layer, skipped=reason)


def first_of(report: SweepReport, kind: str) -> tuple[KernelSweep, Finding] | None:
    """The first finding of a kind over kernels and cases, in their order; confirmed ones before others."""
    pairs: list[tuple[KernelSweep, Any]] = [(s, s.finding(kind)) for s in report.sweeps]
    found = [(s, f) for s, f in pairs if f is not None]
    return min(found, key=lambda pair: not pair[1].confirmed, default=None)
