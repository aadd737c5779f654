"""Run configurations of one kernel on one case: in a warm shared process, or in one of its own.

The idea: production calls are warm, so every process makes one call of the baseline first, which is thrown
away; only `repeat=first` looks at a cold one. What failed may owe that to the calls before it, so a failure
counts as confirmed only when a fresh process shows it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from ...kernels.interface import KernelCall, KernelInfo, RunResult
from ...kernels.pool import KernelHandle, WorkerPool
from ..axes.axis import Ran, Setup, Situation
from ..axes.table import AXES
from ..verdict import VERDICT_ORDER, Outcome, VerdictWord
from .attempt import Attempt, Margins
from .configuration import Configuration, deviations_of, refusals, setup_of
from .engine import run_setup
from .judging import Judge, Judgement, same_bits

# A race shows as moving bits long before it shows as a NaN; Triton's interpreter has none.
PIN_RUNS = {"gpu": 5, "interpreter": 1}


class Process:
    """One worker, and whether it is warm: `warm_setup` (None: stay cold) is run once in every process."""

    def __init__(self, handle: KernelHandle, info: KernelInfo, warm_setup: Setup | None) -> None:
        self.handle, self.info, self.warm_setup = handle, info, warm_setup
        self.baseline_run: Ran | None = None
        """A run of the baseline in this process: the latest warm one, else the one that warmed it."""
        self._warm = warm_setup is None

    def warm(self) -> None:
        """Make the call that is thrown away, if it has not been made in this process."""
        if not self._warm:
            self._warm = True  # before the calls below, which come back here
            assert self.warm_setup is not None
            self.baseline_run = run_setup(self, self.warm_setup, self.info)

    def run(self, calls: list[KernelCall]) -> list[RunResult]:
        """Run calls in order; a worker that was lost makes the next one start cold, so it is warmed again."""
        self.warm()
        results = self.handle.run(calls)
        if any(result.status in ("crash", "timeout") for result in results) and self.warm_setup is not None:
            self._warm = False
        return results


class KernelRuns:
    """A kernel on a case."""

    def __init__(
        self,
        workers: WorkerPool,
        handle: KernelHandle,
        situation: Situation,
        baseline: Configuration,
        judge: Judge,
        *,
        pin_runs: int | None = None,
    ) -> None:
        """pin_runs: runs of a configuration that pins a tuned kernel; None: as `PIN_RUNS` says."""
        self.workers, self.handle, self.judge = workers, handle, judge
        self.situation, self.baseline = situation, baseline
        self.info = situation.info
        self.pin_runs = pin_runs or PIN_RUNS["gpu" if situation.on_gpu else "interpreter"]
        self.warm_setup = setup_of(baseline, situation)
        self.shared = Process(handle, self.info, self.warm_setup)
        self._own_baseline = True
        """The processes were warmed on this very case, so their baseline runs are this one's."""

    def with_evidence(self) -> KernelRuns:
        """The same, after a call of the baseline has told what it launches (which pins there are)."""
        # Whatever the kernel is: that call warms the process, so it is made in any case.
        self.shared.warm()
        ran = self.shared.baseline_run
        evidence = {} if ran is None else ran.evidence
        self.situation = msgspec.structs.replace(self.situation, evidence=evidence)
        return self

    def on(self, situation: Situation) -> KernelRuns:
        """The same kernel and baseline on another case (a shorter one), in the same process."""
        other = KernelRuns(
            self.workers, self.handle, situation, self.baseline, self.judge, pin_runs=self.pin_runs
        )
        other.shared, other.warm_setup, other._own_baseline = self.shared, self.warm_setup, False
        return other

    def attempt(self, configuration: Configuration, *, fresh: bool = False) -> Attempt:
        """Run and judge one configuration. fresh: in a process of its own, whatever the axes say."""
        refused = refusals(configuration, self.situation)
        if refused:
            reason = "; ".join(f"{name}={configuration[name]}: {why}" for name, why in refused.items())
            return self._attempt(configuration, None, verdict="skipped", reason=reason, fresh=fresh)
        setup = setup_of(configuration, self.situation)
        if not self._input_is_sound(setup):
            return self._unsound(configuration, setup, fresh)
        with self._process(setup, fresh) as process:
            return self._judged(configuration, setup, process, fresh)

    def _input_is_sound(self, setup: Setup) -> bool:
        """Whether the change itself made the input unsound (float16 overflows, say)."""
        return setup.judged == "own" or setup is self.warm_setup or self.judge.soundness(setup.case).sound

    def _unsound(self, configuration: Configuration, setup: Setup, fresh: bool) -> Attempt:
        """Bad input is the baseline's finding; a change that makes it bad covers nothing."""
        found = self.judge.soundness(setup.case)
        if self.judge.soundness(self.situation.case).sound:
            reason = f"this change makes the input unsound: {found.reason}"
            return self._attempt(configuration, None, verdict="skipped", reason=reason, fresh=fresh)
        with self._process(setup, fresh) as process:
            return self._judged(configuration, setup, process, fresh)

    @contextmanager
    def _process(self, setup: Setup, fresh: bool) -> Iterator[Process]:
        # Repeats count from a process's start, so they get one of their own, too.
        if not fresh and setup.process == "warm" and setup.runs == 1:
            yield self.shared
            return
        handle = self.workers.begin(
            self.handle.spec, device=self.handle.device, time_limit=self.handle.time_limit
        )
        try:
            yield Process(handle, self.info, None if setup.process == "first" else self.warm_setup)
        finally:
            handle.close()

    def _judged(self, configuration: Configuration, setup: Setup, process: Process, fresh: bool) -> Attempt:
        further = []
        reference = self._reference(configuration, setup, process)
        count = max(setup.runs, self.pin_runs if self._pinned(configuration) else 1)
        runs = [run_setup(process, setup, self.info) for _ in range(count)]
        if configuration == self.baseline and self._own_baseline:
            process.baseline_run = runs[0]
        if reference is not None and runs[0].status == "ok":
            relation, promise, other_setup, other = reference
            if other.status == "ok":
                further.append(same_bits(relation, promise, (setup, runs[0]), (other_setup, other)))
        number, ran, judgement = self._worst(setup, runs, further)
        verdict, reason = judgement.ruling.verdict, judgement.ruling.reason
        if count > 1 and verdict != "pass":
            reason = f"run {number + 1} of {count}: {reason}"
        proofs, missing = self._proofs(configuration, setup, ran)
        if count > setup.runs and "autotune" in proofs:
            proofs["autotune"] += f", {count} times"
        if ran.status == "error" and self._pin_to_blame(configuration, ran):
            verdict, reason = "skipped", f"this pin does not compile: {reason}"
        if missing and verdict in ("pass", "suspect"):
            verdict, reason = "skipped", f"not exercised: {', '.join(missing)}"
        return self._attempt(
            configuration, judgement, verdict=verdict, reason=reason, fresh=fresh, setup=setup, ran=ran,
            proofs=proofs, seconds=sum(one.seconds for one in runs),
        )  # fmt: skip

    def _reference(
        self, configuration: Configuration, setup: Setup, process: Process
    ) -> tuple[str, Any, Setup, Ran] | None:
        """The run whose bits this one must have, where an axis and the contract ask for that."""
        for name in deviations_of(configuration, self.baseline):
            relation = AXES[name].same_bits
            word = "" if relation is None else relation(configuration[name])
            if not word or self.info.contract.relation(word) != "promised":
                continue
            without = {**configuration, name: self.baseline[name]}
            other = setup_of(without, self.situation)
            calls = self.shared if setup.process != "warm" else process
            calls.warm()
            known = calls.baseline_run if without == self.baseline and self._own_baseline else None
            return word, "promised", other, known or run_setup(calls, other, self.info)
        return None

    def _worst(self, setup: Setup, runs: list[Ran], further: list[Outcome]) -> tuple[int, Ran, Judgement]:
        """The worst of several runs; runs with the first one's bits have its judgement."""
        judged = [(0, runs[0], self.judge.judge(setup, runs[0], self.info, further))]
        promise = self.info.contract.relation("run-to-run")
        for number, ran in enumerate(runs[1:], start=1):
            if ran.status == "ok" and runs[0].status == "ok" and _same(ran, runs[0]):
                continue
            moved = []
            if ran.status == "ok" and runs[0].status == "ok":
                moved = [same_bits("run-to-run", promise, (setup, ran), (setup, runs[0]))]
            judged.append((number, ran, self.judge.judge(setup, ran, self.info, [*further, *moved])))
        return min(judged, key=lambda one: (VERDICT_ORDER.index(one[2].ruling.verdict), one[0]))

    def _pinned(self, configuration: Configuration) -> bool:
        """Whether it pins a tuned kernel, or asks its tuner again."""
        return "autotune" in deviations_of(configuration, self.baseline)

    def _pin_to_blame(self, configuration: Configuration, ran: Ran) -> bool:
        """A pin that cannot be compiled, or that the device cannot hold, was never launched."""
        return self._pinned(configuration) and bool(ran.evidence.get("compile_failures"))

    def _proofs(
        self, configuration: Configuration, setup: Setup, ran: Ran
    ) -> tuple[dict[str, str], list[str]]:
        """Axis -> proof that the change was made; and the axes that have none."""
        deviating = deviations_of(configuration, self.baseline)
        proofs = {name: AXES[name].exercised(setup, ran) for name in deviating}
        missing = [f"{name}={deviating[name]}" for name, proof in proofs.items() if not proof]
        return {name: proof for name, proof in proofs.items() if proof}, missing

    def _attempt(
        self,
        configuration: Configuration,
        judgement: Judgement | None,
        *,
        verdict: VerdictWord,
        reason: str,
        fresh: bool,
        setup: Setup | None = None,
        ran: Ran | None = None,
        proofs: dict[str, str] | None = None,
        seconds: float = 0.0,
    ) -> Attempt:
        ruling = None if judgement is None else judgement.ruling
        case = self.situation.case
        return Attempt(
            kernel=self.info.name,
            case=str(case.path) if case.path is not None else case.label,
            config=dict(configuration),
            deviations=deviations_of(configuration, self.baseline),
            verdict=verdict,
            tier=None if ruling is None else ruling.tier,
            rule=None if ruling is None else ruling.rule,
            reason=reason,
            place=None if judgement is None else judgement.place,
            nonfinite=judgement is not None and judgement.nonfinite,
            own_sequences=() if setup is None else setup.own,
            contract_differences=() if ruling is None else tuple(d.text for d in ruling.contract_differences),
            error={} if ruling is None else ruling.error,
            margins=Margins() if judgement is None else judgement.margins,
            exercised=proofs or {},
            seconds=seconds,
            fresh=fresh,
            evidence={} if ran is None else _kept(ran.evidence),
        )


def _same(a: Ran, b: Ran) -> bool:
    """Bit for bit, NaN equal to itself."""
    pairs = ((a.output, b.output), (a.state, b.state))
    return all(
        x is not None and y is not None and x.dtype == y.dtype and torch.equal(_bits(x), _bits(y))
        for x, y in pairs
    )


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().flatten().view(torch.uint8)


def _kept(evidence: dict[str, Any]) -> dict[str, Any]:
    """What of a call's evidence is worth a row in the store."""
    names = ("launched", "pins_unused", "backend", "path", "version", "compile_failures", "guard_written")
    return {name: evidence[name] for name in names if name in evidence}
