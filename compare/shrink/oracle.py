"""The oracle: what a kernel does on a candidate, judged as the failure that is shrunk was judged.

The idea: a failure under deviations is judged as the sweep judges one (the engine around the kernel, the
truth of the case as called); one that only a relation shows is asked for that relation and no other, so that
a candidate costs a few calls. The candidate's truth is new each time and nothing of it is kept.

Leaves to others: whether it is the same failure (`signature`), how often to ask (`asking`).
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...capture.case import Case
from ...kernels.interface import KernelCall, KernelInfo, RunResult
from ...kernels.pool import KernelHandle, WorkerPool
from ..axes.axis import Ran, Setup, Situation
from ..checks import companion, inputs_kept, shape, slots
from ..inputs import call_of
from ..judge import judge
from ..relations import run_to_run
from ..relations.plan import RELATIONS
from ..relations.run import answered, run_relation
from ..repeats import bits_of
from ..session import unanswered
from ..soundness import Soundness, soundness_of
from ..sweep.attempt import Attempt
from ..sweep.baseline import baseline_for, read_baseline
from ..sweep.configuration import Configuration, configuration_of
from ..sweep.judging import Judge, Judgement
from ..sweep.kernel_runs import KernelRuns, Process
from ..threads import threads_for
from ..trial import Trial
from ..verdict import Outcome, Ruling
from ..witness import Witness
from .candidate import Candidate

# A call may take so many times what its size explains before it counts as hung, and never less (seconds).
PATIENCE, LEAST_LIMIT = 10.0, 3.0
# Tokens that a call costs at least, for that comparison.
OVERHEAD_TOKENS = 64


class Limited:
    """A kernel's handle with a time limit for its calls, which can ask for several equal calls at once."""

    def __init__(self, handle: KernelHandle, longest: float) -> None:
        self.handle, self.spec, self.device = handle, handle.spec, handle.device
        self.time_limit = handle.time_limit
        """For loading the kernel."""
        self.longest = longest
        """For a call, at most."""
        self.limit = longest
        self.fresh = True
        """The worker has served no call yet."""
        self.ahead = 1
        """Equal calls that are made at once when one is asked for; the others' results are kept."""
        self._kept: list[RunResult] = []

    @property
    def info(self) -> KernelInfo:
        return self.handle.info

    @property
    def processes_started(self) -> int:
        return self.handle.processes_started

    def run(self, calls: list[KernelCall], **options: Any) -> list[RunResult]:
        if len(calls) == 1 and self.ahead > 1 and not options:
            if not self._kept:
                self._kept = self._run(calls * self.ahead)
            return [self._kept.pop(0)]
        return self._run(calls, **options)

    def _run(self, calls: list[KernelCall], **options: Any) -> list[RunResult]:
        results = self.handle.run(calls, time_limit=self.limit, **options)
        self.fresh = results[-1].status in ("crash", "timeout")
        return results

    def forget(self) -> None:
        """What was asked for ahead belongs to another candidate."""
        self._kept, self.ahead = [], 1

    def close(self) -> None:
        """End the worker; the next call starts another."""
        self.handle.close()
        self.forget()
        self.fresh = True


class Hasty(Judge):
    """Judges equal answers of one candidate once, and says at once where the failure cannot be the same.

    An answer whose worst row errs much less than the failure did, or that is finite where the failure was
    not, need not be judged to be dropped. It counts as one that is not the same, and not as a pass.
    """

    def __init__(self, device: str, seed: int, wanted: Wanted) -> None:
        super().__init__(device, seed)
        self.wanted = wanted
        self._ruled: dict[str, Judgement] = {}
        self.error = 0.0
        """Worst error of the answer that was judged last; infinite where it is not finite."""

    def judge(self, setup: Setup, ran: Ran, info: KernelInfo, further: Any = ()) -> Judgement:
        if ran.status != "ok" or further or ran.further or ran.evidence.get("guard_written"):
            return super().judge(setup, ran, info, further)
        assert ran.output is not None
        assert ran.state is not None
        if self.wanted.kind in NO_ANSWER:
            return OTHERWISE
        if self.wanted.kind == "nonfinite" and is_finite(ran.output) and is_finite(ran.state):
            return OTHERWISE
        outputs = {"output": ran.output, "state": ran.state}
        key = bits_of(RunResult(status="ok", outputs=outputs))
        if key not in self._ruled:
            self._ruled[key] = self._judged(setup, ran, info)
        return self._ruled[key]

    def _judged(self, setup: Setup, ran: Ran, info: KernelInfo) -> Judgement:
        self.error = 0.0 if setup.judged == "own" else self._error(setup, ran, info)
        if setup.judged == "all" and self.error < self.wanted.error:
            return OTHERWISE
        return super().judge(setup, ran, info)

    def _error(self, setup: Setup, ran: Ran, info: KernelInfo) -> float:
        """Largest error of a row over the RMS of the truth; infinite where anything is not finite."""
        assert ran.output is not None
        if not is_finite(ran.output) or ran.state is None or not is_finite(ran.state):
            return float("inf")
        witness = self._of(setup.case).witness
        return worst_error(Trial(witness, info, ran.output, ran.state))


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What of the failure lets an answer be dropped unjudged."""

    kind: str = ""
    error: float = 0.0
    """Answers whose worst row errs less, relative to the truth's RMS, are not the same; 0: unknown."""


# Kinds of failure that an answer, whatever its numbers, is not.
NO_ANSWER = ("error", "crash", "timeout")
# An answer whose error is this much smaller than the failure's shows another failure or none.
MUCH_SMALLER = 0.1
OTHERWISE = Judgement(
    ruling=Ruling(verdict="skipped", reason="not the same failure", error={"output": None, "state": None})
)


def is_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def worst_error(trial: Trial) -> float:
    """Largest RMS error of a row of one head, over the RMS of the tensor's truth."""
    worst = 0.0
    for measured in trial.measured.values():
        rows = measured.rows
        if not rows.square.numel():
            continue
        mean = float(rows.truth_square.mean())
        largest = float(rows.square.max())
        if largest > 0:
            worst = max(worst, (largest / mean) ** 0.5 if mean > 0 else float("inf"))
    return worst


class Oracle:
    """A kernel that candidates are put to."""

    def __init__(
        self,
        workers: WorkerPool,
        handle: KernelHandle,
        start: Case,
        *,
        verdict_device: str,
        seed: int,
        time_limit: float,
        baseline: str | None = None,
    ) -> None:
        self.workers, self.limited = workers, Limited(handle, time_limit)
        self.info = handle.info
        self.device, self.seed = verdict_device, seed
        self.relation = ""
        """Asked for in place of an attempt: a relation, `exact-companion` or `inputs-kept`."""
        self.may_hang = False
        self._given = {} if baseline is None else read_baseline(baseline)
        self._start = start
        self.baseline: Configuration = baseline_for(self._given, self._situation(start))[0]
        self._pace = 0.0
        """Most seconds for a token that a call took which answered."""
        self._case: Case | None = None
        self.wanted = Wanted()
        self._judge = Judge(verdict_device, seed)
        self._hasty = Hasty(verdict_device, seed, self.wanted)

    @property
    def chunk_size(self) -> int | None:
        return self.info.capabilities.default_chunk_size

    def _situation(self, case: Case) -> Situation:
        return Situation(case=case, info=self.info, seed=self.seed)

    def soundness(self, case: Case) -> Soundness:
        """Whether a candidate's input is sound."""
        self._about(case)
        return self._judge.soundness(case)

    def _about(self, case: Case) -> None:
        """Forget what was known of another candidate."""
        if self._case is not case:
            self._case, self._judge = case, Judge(self.device, self.seed)
            self._hasty = Hasty(self.device, self.seed, self.wanted)
            self._hasty._known = self._judge._known
            self.limited.forget()

    def see(
        self, candidate: Candidate, *, full_limit: bool = False, fully: bool = False, ahead: int = 1
    ) -> Attempt:
        """Run the kernel once on a candidate and judge it.

        fully: judge also what cannot be the failure that is looked for. ahead: runs that will be asked for.
        """
        case = candidate.case
        self._about(case)
        self.limited.limit = self.limited.longest if full_limit else self._limit(case)
        self.limited.ahead = ahead if not candidate.deviations and not self.relation else 1
        started = time.monotonic()
        with threads_for(case["v"].numel()):
            if self.relation and not candidate.deviations:
                found = self._related(candidate)
            else:
                found = self._attempted(candidate, self._judge if fully else self._hasty)
        if found.verdict not in ("timeout", "error"):
            pace = (time.monotonic() - started) / (case.n_tokens + OVERHEAD_TOKENS)
            self._pace = max(self._pace, pace)
        return found

    def _limit(self, case: Case) -> float:
        """Where calls hang: a multiple of what the calls that answered took, by tokens."""
        if not self.may_hang or not self._pace:
            return self.limited.longest
        usual = self._pace * (case.n_tokens + OVERHEAD_TOKENS)
        return min(self.limited.longest, max(LEAST_LIMIT, PATIENCE * usual))

    def _attempted(self, candidate: Candidate, judge_: Judge) -> Attempt:
        handle: Any = self.limited
        runs = KernelRuns(self.workers, handle, self._situation(candidate.case), self.baseline, judge_)
        # The process is not warmed by calls of the candidate: the one before it did that.
        runs.warm_setup = None  # type: ignore[assignment]
        runs.shared, runs._own_baseline = Process(handle, self.info, None), False
        return runs.attempt(configuration_of(candidate.deviations, self.baseline))

    def _related(self, candidate: Candidate) -> Attempt:
        """The case, and the one relation that broke."""
        witness = self._witness(candidate.case)
        call = call_of(candidate.case)
        first = answered(call, self.limited.run([call])[0])
        if first.status != "ok":
            return self._attempt(candidate, unanswered(first), first)
        fault = shape.check(witness.inputs, first.outputs)
        if fault.status == "fires":
            ruling = Ruling(
                verdict="fail", tier=fault.tier, rule=fault.check, reason=fault.reason, worst_tile=fault.place
            )
            return self._attempt(candidate, ruling, first)
        trial = Trial(witness, self.info, first.outputs["output"], first.outputs["final_state"])
        soundness = soundness_of(witness)
        further = self._further(trial, call, first) if soundness.sound else []
        return self._attempt(candidate, judge(trial, soundness, further), first)

    def _witness(self, case: Case) -> Witness:
        return Witness(case, device=self.device, seed=self.seed)

    def _further(self, trial: Trial, call: KernelCall, first: RunResult) -> list[Outcome]:
        if self.relation == inputs_kept.NAME:
            return [inputs_kept.check(first.evidence, self.info.contract, given=len(call.tensors))]
        if self.relation == slots.NAME:
            return [slots.check(call.tensors, first.outputs)] if "pool" in call.tensors else []
        if self.relation in RELATIONS:
            steady = self.info.contract.relation(run_to_run.NAME) != "not promised"
            return run_relation(self.limited, trial, self.relation, seed=self.seed, steady=steady)
        outcomes = []
        for name, twin in companion.plans(trial.witness, seed=self.seed).items():
            other = call_of(twin)
            result = answered(other, self.limited.run([other])[0])
            outcomes.append(companion.check(twin, self.info, result, device=trial.witness.device, name=name))
        return outcomes

    def look_for(self, kind: str) -> None:
        """Drop unjudged from now on what cannot be a failure of this kind, as wrong as the last one."""
        error = self._hasty.error if kind == "wrong" else 0.0
        self.wanted = Wanted(kind=kind, error=MUCH_SMALLER * error if error < float("inf") else 0.0)

    def _attempt(self, candidate: Candidate, ruling: Ruling, first: RunResult) -> Attempt:
        return attempt_of(candidate.case, self.info, self.baseline, ruling, first)

    def fresh_twin(self) -> Oracle:
        """The same on a process of its own; close its `limited` afterwards."""
        handle = self.workers.begin(
            self.limited.spec,
            device=self.limited.device,
            time_limit=self.limited.time_limit,
            environment=self.limited.handle.environment,
        )
        twin = Oracle(
            self.workers, handle, self._start, verdict_device=self.device, seed=self.seed,
            time_limit=self.limited.longest,
        )  # fmt: skip
        twin.baseline, twin.relation, twin.wanted = self.baseline, self.relation, self.wanted
        return twin


def attempt_of(
    case: Case, info: KernelInfo, baseline: Configuration, ruling: Ruling, first: RunResult
) -> Attempt:
    """A ruling on a plain call, in the sweep's form."""
    place = ruling.first_nonfinite or ruling.worst_tile
    if place is None:
        place = next((o.place for o in ruling.outcomes if o.status == "fires" and o.place), None)
    return Attempt(
        kernel=info.name,
        case=str(case.path) if case.path is not None else case.label,
        config=dict(baseline),
        deviations={},
        verdict=ruling.verdict,
        tier=ruling.tier,
        rule=ruling.rule,
        reason=ruling.reason,
        place=place,
        nonfinite=ruling.verdict == "fail" and ruling.first_nonfinite is not None,
        own_sequences=tuple(range(case.n_sequences)),
        contract_differences=tuple(d.text for d in ruling.contract_differences),
        error=ruling.error,
        seconds=first.seconds or 0.0,
        evidence=msgspec.to_builtins(
            {n: v for n, v in first.evidence.items() if n in ("launched", "backend", "path", "version")},
            enc_hook=repr,
        ),
    )
