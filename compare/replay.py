"""replay: run a finding again in a new process; the same failure, or what has changed since.

The idea: a failure is worth keeping only if it comes again, and where it does not, the first question is what
is different: another version, another GPU, another driver, another tuned configuration. The finding says on
what it was seen; this says on what it was run now, and puts the two side by side.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..capture.case import Case
from ..capture.errors import BadInput
from ..capture.fingerprint import fingerprint
from ..kernels.interface import KernelInfo
from ..kernels.pool import WorkerPool
from .diff import verdict_device
from .finding import Facts, Finding, environment_for, find
from .jsonout import place, plain_numbers
from .report_words import full
from .shrink.asking import Rate
from .shrink.candidate import Candidate
from .shrink.oracle import NO_ANSWER, Oracle
from .shrink.reduce import checked_deviations
from .shrink.result import words_of
from .shrink.signature import COMES_AND_GOES, agrees, fault_of
from .store import Signature
from .sweep.attempt import Attempt
from .sweep.configuration import in_words
from .verdict import FAILING

Outcome = Literal["same", "another failure", "passes"]
STEADY_RUNS = 3
MOST_RUNS = 400
LOADING = 300.0  # seconds that a kernel may take to load
# What of a machine and of a kernel's process is compared, and in which words.
MACHINE = ("gpu.name", "gpu.driver", "gpu.cuda", "python", "platform")
PROCESS = ("torch", "triton", "device", "interpreted")


class Replay(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What came of running it again."""

    name: str
    kernel: str
    case: Case
    deviations: dict[str, str]
    facts: Facts
    """As it was kept; a kernel of "" where the case says nothing."""
    outcome: Outcome
    attempt: Attempt
    """The run that shows the outcome."""
    rate: Rate
    """Runs that failed, as kept or otherwise, of all."""
    changed: dict[str, tuple[str, str]] = {}
    """What is different: name -> (then, now)."""
    seconds: float = 0.0
    command: str = ""

    @property
    def exit_status(self) -> int:
        """1 where it fails, 0 where it does not; 3 where the kernel refused the call."""
        if self.attempt.verdict == "skipped":
            return 3
        return int(self.outcome != "passes")


def replay(
    case: Case | Path | str,
    kernel: str | None = None,
    *,
    deviations: Mapping[str, str] | None = None,
    baseline: str | None = None,
    runs: int | None = None,
    original: bool = False,
    device: str = "auto",
    time_limit: float | None = None,
    seed: int | None = None,
    report: Callable[..., None] | None = None,
    command: str = "",
) -> Replay:
    """Run a finding again in a new process, until it shows or has had its chance.

    case: a case, its file, or `RUN/SIGNATURE`. kernel, deviations, baseline, time_limit, seed: in place of
    what the finding says. runs: at most; None: 3, or as many as would show a failure of the rate that was
    measured. original: the case as it was found, not the shrunk one.
    Raises BadInput for a finding that names no kernel; CannotRun where it cannot be loaded.
    """
    started = time.monotonic()
    finding = find(case, original=original)
    facts = finding.facts
    name = kernel or facts.kernel
    if not name:
        raise BadInput(f"{finding.name}: says no kernel that fails on it; name one with --kernel")
    changed = checked_deviations(facts.deviations if deviations is None else deviations)
    limit = time_limit or facts.time_limit
    most = runs or runs_for(facts)
    candidate = Candidate(finding.case, changed)
    say = report or (lambda *words: None)
    with WorkerPool(device=device, time_limit=max(limit, LOADING)) as workers:
        handle = workers.open(name, environment=environment_for(facts))
        oracle = Oracle(
            workers, handle, finding.case, verdict_device=verdict_device(device), time_limit=limit,
            seed=facts.seed if seed is None else seed, baseline=baseline or facts.baseline,
        )  # fmt: skip
        oracle.relation = "" if changed else facts.relation
        outcome, attempt, rate = _run(oracle, candidate, finding, most, say)
        info = handle.info
    return Replay(
        name=finding.name,
        kernel=info.name,
        case=finding.case,
        deviations=changed,
        facts=facts,
        outcome=outcome,
        attempt=attempt,
        rate=rate,
        changed=differences(facts, info, attempt),
        seconds=time.monotonic() - started,
        command=command,
    )


def runs_for(facts: Facts) -> int:
    """Runs after which a failure of the known rate would have shown with 99 %."""
    rate = Rate(failures=facts.failures or 0, runs=facts.runs or 0)
    if not rate.failures or rate.steady:
        return STEADY_RUNS
    return min(MOST_RUNS, rate.clean_runs)


def _run(
    oracle: Oracle, candidate: Candidate, finding: Finding, most: int, say: Callable[..., None]
) -> tuple[Outcome, Attempt, Rate]:
    """All runs, in one new process as long as it lives; a steady failure is believed at once."""
    shown: dict[Outcome, Attempt] = {}
    failures = runs = 0
    while runs < most:
        say(f"{oracle.info.name}: run {runs + 1} of {most} ({words_of(candidate.case)})", runs, most)
        attempt = oracle.see(candidate, fully=True, full_limit=True)
        outcome: Outcome = "passes"
        if attempt.verdict in FAILING:
            same = is_same(finding, attempt, oracle.chunk_size)
            outcome = "same" if same else "another failure"
        runs, failures = runs + 1, failures + (outcome != "passes")
        shown.setdefault(outcome, attempt)
        enough = outcome == "same" and (runs >= STEADY_RUNS or attempt.verdict in ("timeout", "error"))
        if attempt.verdict == "skipped" or enough:
            break  # it will not be otherwise; a hang takes its whole limit, a crash a process
    best: Outcome = next(o for o in ("same", "another failure", "passes") if o in shown)
    return best, shown[best], Rate(failures=failures, runs=runs)


def is_same(finding: Finding, attempt: Attempt, chunk_size: int | None) -> bool:
    """Whether an attempt shows the failure that was kept; any failure does where nothing was."""
    facts, fault = finding.facts, fault_of(attempt, chunk_size)
    if fault is None or not facts.kernel:
        return fault is not None
    if facts.kind and facts.kind != fault.kind:
        return False
    if finding.identity is not None:
        return agrees(finding.identity, attempt, chunk_size)
    kept = Signature(
        kernel=facts.kernel, version=facts.version, tier=facts.tier, deviations=facts.deviations,
        class_="error" if facts.kind in NO_ANSWER else facts.class_, stage=facts.stage,
        place_pattern=facts.place_pattern or COMES_AND_GOES,
    )  # fmt: skip
    return agrees(kept, attempt, chunk_size)


def differences(facts: Facts, info: KernelInfo, attempt: Attempt) -> dict[str, tuple[str, str]]:
    """What is otherwise than when it was kept; nothing where nothing is known of then."""
    then, now = dict(_told(facts.machine, facts.environment)), dict(
        _told(fingerprint(), plain_numbers(msgspec.to_builtins(info.environment, enc_hook=repr)))
    )  # fmt: skip
    if facts.kernel:
        then["kernel"], now["kernel"] = facts.kernel, info.name
    launched = attempt.evidence.get("launched") or {}
    for name, configuration in facts.launched.items():
        then[f"configuration of {name}"] = configuration
        now[f"configuration of {name}"] = str(launched.get(name, "not launched"))
    known = [name for name in then if name in now]
    return {name: (then[name], now[name]) for name in known if then[name] != now[name]}


def _told(machine: Mapping[str, Any], process: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, value) of what is compared, as far as it was written down."""
    for path in MACHINE:
        value: Any = machine
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None or (path == "gpu.name" and "gpu" in machine):
            yield path.replace("gpu.name", "GPU").replace("gpu.", ""), str(value or "none")
    for name, version in (machine.get("packages") or {}).items():
        if name not in ("torch", "triton"):
            yield name, str(version)
    for name in PROCESS:
        if name in process:
            yield f"{name} of the kernel's process", str(process[name])


def lines(found: Replay) -> Iterator[str]:
    """The report, line by line."""
    facts, attempt = found.facts, found.attempt
    place_words = "" if attempt.place is None else f", {full(attempt.place)}"
    what = f"{found.kernel} on {words_of(found.case)}, {in_words(found.deviations)}"
    yield f"{what}: {attempt.verdict}{place_words}"
    yield f"  {attempt.reason}"
    if not facts.kernel:
        yield "the case says nothing of an earlier run to compare with"
    elif found.outcome == "same":
        yield f"the same failure as was kept; {found.rate.in_words()} in a new process"
    elif found.outcome == "another failure":
        yield f"fails, but otherwise than was kept: {facts.verdict}, {facts.reason}"
    else:
        yield f"does not fail in {found.rate.runs} runs; kept was: {facts.verdict}, {facts.reason}"
    if found.changed:
        for name, (then, now) in found.changed.items():
            yield f"changed: {name} was {then}, is {now}"
    elif facts.kernel and facts.machine:
        yield "versions, GPU and driver are as they were"
    yield f"{attempt.verdict} in {found.seconds:.1f} s: {found.command or 'gdncheck replay'}"


def dumps(found: Replay) -> str:
    """One JSON document."""
    body = {
        "schema": 1,
        "kernel": found.kernel,
        "outcome": found.outcome,
        "verdict": found.attempt.verdict,
        "tier": found.attempt.tier,
        "rule": found.attempt.rule,
        "reason": found.attempt.reason,
        "place": place(found.attempt.place),
        "deviations": found.deviations,
        "failures": found.rate.failures,
        "runs": found.rate.runs,
        "interval": list(found.rate.interval),
        "kept": msgspec.to_builtins(found.facts) if found.facts.kernel else None,
        "changed": {name: {"then": then, "now": now} for name, (then, now) in found.changed.items()},
        "seconds": found.seconds,
        "command": found.command,
    }
    return json.dumps(plain_numbers(body), indent=2, allow_nan=False)
