"""shrink: the smallest case that still shows the same failure; the library twin of `gdncheck shrink`.

The idea: the start is run first, because shrinking what does not fail finds nothing. Then passes propose
smaller candidates, structure before values, and whatever is smaller in one fixed order, has a sound input
and shows the same failure becomes the best, until a round of all passes finds nothing more. What passed and
is nearest to the end is kept: the two side by side say what it takes. The end is run again in a new process.

Leaves to others: candidates (`structure`, `values`), the same failure (`signature`), how often to ask
(`asking`), going on after a kill (`journal`).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...capture.case import Case
from ...capture.casefile import write_case
from ...capture.errors import BadInput
from ...kernels.pool import KernelHandle, WorkerPool
from ..axes.table import check_names, value_of
from ..diff import verdict_device
from ..finding import environment_for, facts_of, find, with_facts
from ..store import Signature
from ..sweep.attempt import Attempt
from ..sweep.explain import words_of as words_of_error
from ..sweep.judging import digest
from . import structure, values
from .asking import Answer, Rate, ask
from .candidate import Candidate, rule_tensors
from .journal import Journal
from .oracle import Oracle
from .result import Neighbour, Shrunk, distance, words_of
from .signature import fault_of
from .start import Meter, Say, Wanted, check_start

PASSES: tuple[tuple[str, Callable[[structure.Box], Iterator[Candidate]]], ...] = (
    ("axes", structure.axes),
    ("pool", structure.pools),
    ("sequences", structure.sequences),
    ("heads", structure.heads),
    ("splits", structure.splits),
    ("states", structure.states),
    # Before the tokens: equal tokens can be taken out anywhere.
    ("values", values.whole),
    ("tokens", structure.tokens),
    ("dims", structure.dims),
    ("bits", values.together),
    ("blocks", values.blocks),
)
# Where every candidate takes many runs, the ones that take away most come first.
STRUCTURE_FIRST = tuple(sorted(PASSES, key=lambda one: one[0] == "values"))
BUDGET = 300.0  # seconds
# Equal runs of a candidate that are asked for at once.
AHEAD, FEW_AHEAD = 32, 8
# Runs of the end in a new process; candidates that may be the nearest passing one.
CONFIRMING, NEIGHBOURS = 3, 8
CONFIRMING_SECONDS = 20.0  # a flake is not counted for longer, once it has shown
LOADING = 300.0  # seconds that a kernel may take to load
# Least K and V by family: below, the kernel is not made for it. A kernel by import path may be a Triton one.
LEAST_DIMS: dict[str, tuple[int, int]] = {"flashinfer": (128, 128), "vllm-cpu": (64, 64), "emulation": (1, 1)}
USUAL_DIMS = (16, 16)


def shrink(
    case: Case | Path | str,
    kernel: str | KernelHandle | None = None,
    *,
    signature: Signature | str | None = None,
    deviations: Mapping[str, str] | None = None,
    budget: float | None = BUDGET,
    runs: int | None = None,
    seed: int | None = None,
    report: Say | None = None,
    out: Path | str | None = None,
    baseline: str | None = None,
    device: str = "auto",
    time_limit: float | None = None,
    command: str = "",
) -> Shrunk:
    """Make a failing case as small as it goes while it fails in the same way.

    case: a case, its file, or `RUN/SIGNATURE` of a run's store. kernel: a name, or an open kernel; None: the
    one that the finding names. signature: of the finding, or its 16 digits; None: whatever the start shows.
    deviations: {axis: value} under which it fails; None: the finding's. budget: seconds, and runs: kernel
    runs, after which the best so far is returned. out: file of the best so far; with it a killed shrink goes
    on where it was; the nearest passing case is written beside it.
    baseline: what the deviations depart from. time_limit: seconds for one call; None: 300, or the open
    kernel's own. report: told (words, done, total) as it goes.
    Ctrl-C returns the best so far, `stopped` being `interrupted`.
    Raises BadInput where the start does not fail, or not as the signature says; CannotRun.
    """
    finding = find(case)
    start, facts = finding.case, finding.facts
    kernel = kernel or facts.kernel
    if not kernel:
        raise BadInput(f"{finding.name}: says no kernel that fails on it; name one with --kernel")
    changed = checked_deviations(facts.deviations if deviations is None else deviations)
    baseline = facts.baseline if baseline is None else baseline
    seed = facts.seed if seed is None else seed
    if signature is None:
        signature = finding.identity
    if budget is not None and not budget > 0:
        raise BadInput(f"budget is {budget}; give seconds above 0")
    if runs is not None and runs < 1:
        raise BadInput(f"runs is {runs}; give 1 or more")
    if isinstance(signature, str) and not re.fullmatch(r"[0-9a-f]{16}", signature):
        raise BadInput(f"signature is {signature!r}; give the 16 hex digits that name a finding")
    name = kernel if isinstance(kernel, str) else kernel.spec.name
    key = {
        "case": digest(start), "kernel": name, "deviations": changed, "baseline": baseline, "seed": seed,
        "signature": signature.digest if isinstance(signature, Signature) else signature,
    }  # fmt: skip
    journal = Journal(None if out is None else Path(out), key)
    with WorkerPool(device=device, time_limit=max(time_limit or 0.0, LOADING)) as workers:
        handle = kernel
        if isinstance(handle, str):
            handle = workers.open(handle, environment=environment_for(facts))
        oracle = Oracle(
            workers, handle, start, verdict_device=verdict_device(device), seed=seed, baseline=baseline,
            time_limit=time_limit or handle.time_limit,
        )  # fmt: skip
        say = report or (lambda *words: None)
        meter = Meter(oracle, budget, runs)
        shrinking = _Shrinking(meter, Candidate(start, changed), journal, say)
        return shrinking.run(signature, {"baseline": baseline, "seed": seed, "tune": facts.tune}, command)


def checked_deviations(deviations: Mapping[str, str] | None) -> dict[str, str]:
    """{axis: value} as the table spells them. Raises BadInput for what is no axis or value."""
    given = dict(deviations or {})
    check_names(given, "deviations")
    return {name: value_of(name, value, "deviations") for name, value in given.items()}


def passing_path(out: Path) -> Path:
    """Where the nearest passing case lies: beside the smallest failing one."""
    return out.with_name(f"{out.name.removesuffix('.safetensors')}.passing.safetensors")


class _Ended(Exception):
    """The budget is used up."""


class _Shrinking:
    """One shrink on its way."""

    def __init__(self, meter: Meter, start: Candidate, journal: Journal, say: Say) -> None:
        self.meter, self.oracle, self.start = meter, meter.oracle, start
        self.journal, self.say = journal, say
        self.tried = 0
        self.stopped = "smallest"
        self.passed: list[Candidate] = []
        """Candidates that did not show the failure, since the best became the best."""

    def run(self, wanted: Wanted, asked: dict[str, Any], command: str) -> Shrunk:
        """Everything in order: the start, the search, the confirmation, the neighbour.

        asked: facts of the finding that only the caller knows.
        """
        self.journal.open()
        done = False
        try:
            self._begin(wanted)
            self._search()
            shrunk = self._finish(asked, command)
            done = shrunk.stopped == "smallest"
            return shrunk
        finally:
            self.journal.close(done=done)

    def _begin(self, wanted: Wanted) -> None:
        started = check_start(self.meter, self.start, wanted, self.journal.rate, self.say)
        self.started, self.rate, self.fault = started, started.rate, started.fault
        self.attempt = started.attempt
        self.journal.note_rate(self.rate)
        per = "1 run" if self.rate.most_runs == 1 else f"up to {self.rate.most_runs} runs"
        self.say(f"the start {self.rate.in_words()}: {self.fault.in_words()}; {per} for each candidate")
        best = self.journal.best() or self.start
        spec = self.oracle.limited.spec
        least = LEAST_DIMS.get("" if spec.by_import_path else spec.name.partition(".")[0], USUAL_DIMS)
        self.box = structure.Box(best, self.attempt.place, self.oracle.seed, least)
        if best is not self.start:
            self.say(f"going on from {words_of(best.case)}")

    def _search(self) -> None:
        """Rounds of all passes until one finds nothing; the best is kept whatever ends it."""
        try:
            if self.box.best is self.start:
                bare = self.start.with_case(rule_tensors(self.start.case), "without what no call is given")
                self._try(bare, "tensors")
            while self._round():
                pass
        except _Ended:
            self.stopped = "budget" if self.meter.out_of_time else "runs"
        except KeyboardInterrupt:
            self.stopped = "interrupted"

    def _round(self) -> bool:
        """All passes once; whether anything became smaller."""
        before = self.box.best
        for name, propose in PASSES if self.rate.steady else STRUCTURE_FIRST:
            for candidate in propose(self.box):
                self._try(candidate, name)
        return self.box.best is not before

    def _try(self, candidate: Candidate, stage: str) -> bool:
        """Put a candidate to the kernel, if new, smaller and sound; keep it if it fails the same way."""
        if not candidate.is_smaller_than(self.box.best):
            return False
        key = f"{digest(candidate.case)} {json.dumps(candidate.deviations, sort_keys=True)}"
        if key in self.journal.tried:
            return False
        if self.meter.late():
            raise _Ended
        if not self._as_sound(candidate.case):
            self.journal.reject(key)
            return False
        self.tried += 1
        kept = len(self.journal.accepted)
        self.say(f"{stage}: {words_of(self.box.best.case)}; {self.tried} tried, {kept} kept")
        answer = self._asked(candidate)
        if not answer.decided:
            raise _Ended
        if not answer.same:
            self.journal.reject(key)
            other = answer.other
            if other is not None and other.verdict in ("pass", "skipped") and not answer.failures:
                self.passed.append(candidate)
            return False
        assert answer.shown is not None
        self.journal.accept(candidate)
        self.box.best, self.box.place = candidate, answer.shown.place
        self.attempt, self.passed = answer.shown, []
        self.oracle.look_for(self.fault.kind)
        return True

    def _is_same(self, attempt: Attempt) -> bool:
        return self.fault.matches(fault_of(attempt, self.oracle.chunk_size))

    def _asked(self, candidate: Candidate) -> Answer:
        used = not self.oracle.limited.fresh
        # Crashes end the worker, so that few are worth asking for at once.
        ahead = min(self.rate.clean_runs, AHEAD if self.fault.kind != "crash" else FEW_AHEAD)

        def see() -> Attempt:
            return self.meter.see(candidate, ahead=ahead)

        answer = ask(see, self._is_same, self.rate, self.meter.late)
        if answer.same and self.fault.kind == "crash" and used and self.rate.steady:
            # A crash may be the calls' before it: only a worker of its own convicts the candidate.
            self.oracle.limited.close()
            answer = ask(see, self._is_same, self.rate, self.meter.late)
        return answer

    def _as_sound(self, case: Case) -> bool:
        """Sound as the start is: a reduced input must not be to blame for its own failure."""
        found, start = self.oracle.soundness(case), self.started.soundness
        if found.sound != start.sound or (found.reset and not start.reset):
            return False
        return found.sound or words_of_error(found.reason) == words_of_error(start.reason)

    def _finish(self, asked: dict[str, Any], command: str) -> Shrunk:
        best, start = self.box.best, self.start
        rate, attempt = self._confirmed(best)
        facts = facts_of(
            self.oracle.info, attempt or self.attempt, kind=self.fault.kind,
            signature=self.started.signature.digest, place_pattern=self.fault.pattern,
            deviations=best.deviations, relation=self.oracle.relation, failures=rate.failures, runs=rate.runs,
            time_limit=self.oracle.limited.longest, history=tuple(self.journal.accepted), **asked,
        )  # fmt: skip
        best = best.with_case(with_facts(best.case, facts), best.change)
        self.journal.settle(best)
        neighbour = self._neighbour()
        if neighbour is not None and self.journal.out is not None:
            write_case(neighbour.case, passing_path(self.journal.out))
        return Shrunk(
            kernel=self.oracle.info.name,
            version=self.oracle.info.version,
            case=best.case,
            deviations=best.deviations,
            signature=self.started.signature,
            fault=self.fault,
            attempt=attempt or self.attempt,
            start_rate=self.rate,
            rate=rate,
            confirmed=attempt is not None,
            start_size=start.size,
            size=best.size,
            start_words=words_of(start.case),
            words=words_of(best.case),
            neighbour=neighbour,
            accepted=tuple(self.journal.accepted),
            tried=self.tried,
            runs=self.meter.runs,
            stopped=self.stopped,
            seconds=time.monotonic() - self.meter.started,
            baseline=self.oracle.baseline,
            path=self.journal.out,
            command=command,
        )

    def _confirmed(self, best: Candidate) -> tuple[Rate, Attempt | None]:
        """The end in a process of its own: as often as the rate needs; a hang with the whole time limit."""
        failures = runs = 0
        shown: Attempt | None = None
        if self.stopped == "interrupted":
            return Rate(failures=0, runs=0), None
        self.say(f"confirming {words_of(best.case)} in a new process")
        twin = self.oracle.fresh_twin()
        wanted = CONFIRMING if self.rate.steady else self.rate.clean_runs
        began = time.monotonic()
        try:
            while runs < wanted:
                attempt = twin.see(best, full_limit=True, ahead=min(wanted, FEW_AHEAD))
                same = self._is_same(attempt)
                runs, failures = runs + 1, failures + same
                shown = attempt if same else shown
                late = time.monotonic() - began > CONFIRMING_SECONDS
                if failures and (late or self.fault.kind == "timeout"):
                    break  # a hang takes the whole limit each time
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        finally:
            twin.limited.close()
        self.meter.runs += runs
        return Rate(failures=failures, runs=runs), shown

    def _neighbour(self) -> Neighbour | None:
        """Of what did not fail beside the best, the one of the least change that passes in a new process."""
        best = self.box.best
        if self.stopped == "interrupted" or not self.passed:
            return None
        self.say("the nearest that passes")
        twin = self.oracle.fresh_twin()
        try:
            for candidate in sorted(self.passed, key=lambda one: distance(one, best))[:NEIGHBOURS]:
                attempt = twin.see(candidate, fully=True)
                self.meter.runs += 1
                if attempt.verdict == "pass":
                    return Neighbour(
                        case=candidate.case, deviations=candidate.deviations, change=candidate.change,
                        attempt=attempt,
                    )  # fmt: skip
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        finally:
            twin.limited.close()
        return None
