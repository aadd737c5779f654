"""Repeats: the same call n times in each of m processes; how often it fails, and whether its bits move.

The idea: what a run returned is judged once per distinct set of bits, however often it came, so a thousand
clean runs cost one verdict. Each process is new and its first call is kept apart from its warm ones; on a
GPU every second run has a busy stream beside it. What the counts allow to say is `statistics`'.

Leaves to others: sending equal bits once (`kernels.distinct`), what the kinds of answers add up to
(`repeat_verdict`), printing and JSON (`repeat_report`), the sweep's own axis `repeat`, which asks for a few
runs only.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..capture.case import Case
from ..capture.errors import BadInput, CannotRun
from ..kernels.interface import KernelCall, KernelInfo, RunResult
from ..kernels.pool import WorkerPool
from ..kernels.registry import default_kernels
from .checks import inputs_kept, shape, slots
from .diff import cases_of, verdict_device
from .inputs import call_of
from .judge import judge
from .relations import run_to_run
from .relations.compare_runs import compare_runs
from .relations.run import answered
from .repeat_result import RepeatReport, RepeatResult, series_name
from .repeat_verdict import Kind, Run, ruled
from .session import Runner, unanswered
from .soundness import Soundness, soundness_of
from .statistics import CONFIDENCE, USUAL_RATES, Comparison, compare_rates
from .threads import threads_for
from .trial import Trial
from .tunings import TUNED_AT, Say, TuningAccount, check_tunings, tuners_of, tuning_account
from .verdict import Outcome, Ruling
from .witness import Witness

Pins = dict[str, dict[str, Any]]
Opener = Callable[[], Runner]
BATCH_SECONDS = 3.0  # between two words of progress
LARGEST_BATCH = 64
ACCOUNT = ("launched", "compile_failures", "tuners")


def repeat(
    case: Case | Path | str | None = None,
    kernels: Runner | str | Sequence[str] | None = None,
    *,
    layer: int | None = None,
    captures: Path | str = "captures",
    runs: int = 30,
    processes: int = 1,
    rule_out: float = USUAL_RATES[0],
    confidence: float = CONFIDENCE,
    busy: bool = True,
    pins: Pins | None = None,
    against: Pins | None = None,
    tune: str = "stock",
    tunings: int = 0,
    tuned_at: Sequence[int] = TUNED_AT,
    first: int | None = None,
    device: str = "auto",
    time_limit: float = 300.0,
    seed: int = 0,
    strict: bool = False,
    progress: Say | None = None,
    command: str = "",
) -> RepeatReport:
    """Run each kernel `runs` times in each of so many new processes, and say how often it fails.

    kernels: names, or one open kernel, which has one process. rule_out: the failure rate that clean runs
    are to exclude. busy: on a GPU, every second run beside a busy stream. pins: kernel -> configuration for
    every run; against: the same series again under these pins. tune: how autotuned kernels without a pin
    choose (`stock`, `never`, `fresh`). tunings: after the runs, so many fresh tunings at each length of
    `tuned_at` and at the case's own, counted (a GPU is needed). seed: of the yardstick.
    Raises BadInput for a wrong case, name or number; CannotRun where nothing could run.
    """
    started = time.monotonic()
    _check(runs=runs, processes=processes, rule_out=rule_out, tune=tune)
    check_tunings(tunings, tuned_at)
    say: Say = progress or (lambda *args: None)
    wanted = Wanted(runs=runs, processes=processes, busy=busy, rule_out=rule_out, confidence=confidence)
    settings = [{"pins": p or {}, "tune": tune} for p in ([pins] if against is None else [pins, against])]
    results: list[RepeatResult] = []
    comparisons: list[tuple[str, str, Comparison]] = []
    accounts: list[TuningAccount] = []
    with WorkerPool(device=device, time_limit=time_limit) as pool:
        for one in cases_of(case, layer, captures, first):
            with threads_for(one["v"].numel()):
                bench = Bench(one, verdict_device(device), seed)
                series = [Series(opener, wanted, s) for opener in _openers(pool, kernels) for s in settings]
                found = [each.run(bench, say) for each in series]
                accounts += _accounts(series[:: len(settings)], one, tunings, tuned_at, say)
            results += found
            comparisons += _compared(found)
    return RepeatReport(
        results=tuple(results), comparisons=tuple(comparisons), tuning=tuple(accounts), strict=strict,
        seconds=time.monotonic() - started, command=command,
    )  # fmt: skip


def _openers(pool: WorkerPool, kernels: Runner | str | Sequence[str] | None) -> list[Opener]:
    """For each kernel, what opens it in a new process; an open one stays as it is."""
    if kernels is not None and not isinstance(kernels, str | Sequence):
        runner = kernels
        return [lambda: runner]
    names = [kernels] if isinstance(kernels, str) else list(kernels or default_kernels())
    if not names:
        raise CannotRun("no kernel is installed; name one with --kernel, or see gdncheck doctor")
    return [partial(pool.open, name) for name in names]


def _accounts(
    series: Sequence[Series], case: Case, n: int, tuned_at: Sequence[int], say: Say
) -> Iterator[TuningAccount]:
    """The tuners that each kernel passed, and what fresh tunings draw."""
    for one in series:
        tuners = tuners_of(one.tuning)
        if tuners or n:
            yield tuning_account(one.opener(), case, tuners, n, tuned_at, say=say)


def _check(*, runs: int, processes: int, rule_out: float, tune: str) -> None:
    """Arguments at the door."""
    for name, value in (("runs", runs), ("processes", processes)):
        if value < 1:
            raise BadInput(f"{name} is {value}; give 1 or more")
    if not 0 < rule_out < 1:
        raise BadInput(f"the rate to rule out is {rule_out}; give a number between 0 and 1, such as 0.001")
    if tune not in ("stock", "never", "fresh"):
        raise BadInput(f"tune is {tune!r}; use stock, never or fresh")


def _compared(results: list[RepeatResult]) -> Iterator[tuple[str, str, Comparison]]:
    """The first series against each other one; and, within each, busy against quiet, cold against warm."""
    for other in results[1:]:
        if "skipped" not in (results[0].verdict, other.verdict):
            table = compare_rates(results[0].failures, results[0].runs, other.failures, other.runs)
            yield series_name(results[0]), series_name(other), table
    for result in results:
        pairs: tuple[tuple[str, Callable[[Run], bool]], ...] = (
            ("beside a busy stream", lambda run: run.busy),
            ("first call of a process", lambda run: run.cold),
        )
        for name, wanted in pairs:
            inside, outside = result.counted(wanted), result.counted(_others(wanted))
            if inside[1] and outside[1] and result.failures:
                yield f"{series_name(result)} {name}", "its other runs", compare_rates(*inside, *outside)


def _others(wanted: Callable[[Run], bool]) -> Callable[[Run], bool]:
    return lambda run: not wanted(run)


class Bench:
    """A case with its truth: judges an answer, once per set of bits."""

    def __init__(self, case: Case, device: str, seed: int) -> None:
        self.case = case
        self.witness = Witness(case, device=device, seed=seed)
        self.soundness: Soundness = soundness_of(self.witness)
        self.call = call_of(case)

    def trial(self, info: KernelInfo, result: RunResult) -> Trial:
        return Trial(self.witness, info, result.outputs["output"], result.outputs["final_state"])

    def misshapen(self, result: RunResult) -> Outcome | None:
        """The fault of an answer that cannot be compared at all."""
        fault = shape.check(self.witness.inputs, result.outputs)
        return fault if fault.status == "fires" else None

    def rule(self, info: KernelInfo, result: RunResult) -> Ruling:
        """The verdict on one answer, by the rules of `diff` without the relations."""
        if result.status != "ok":
            return unanswered(result)
        fault = self.misshapen(result)
        if fault is not None:
            return Ruling(
                verdict="fail", tier=fault.tier, rule=fault.check, reason=fault.reason, outcomes=(fault,)
            )
        further: list[Outcome] = []
        if self.soundness.sound:
            given = self.call.tensors
            further.append(inputs_kept.check(result.evidence, info.contract, given=len(given)))
            if "pool" in given:
                further.append(slots.check(given, result.outputs))
        return judge(self.trial(info, result), self.soundness, further)

    def difference(self, base: Trial, result: RunResult) -> Outcome:
        """Where an answer differs from the first one, and whether rounding explains it."""
        plan = run_to_run.plan(self.witness.inputs, seed=0)[0]
        output, state = result.outputs["output"], result.outputs["final_state"]
        return compare_runs(base, plan, output, state, promise="observed", steady=False)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """How often, and how sure."""

    runs: int
    """In each process."""
    processes: int = 1
    busy: bool = True
    rule_out: float = USUAL_RATES[0]
    confidence: float = CONFIDENCE
    cold: bool = True
    """The first run of each process is its first call ever; False where the kernel was called before."""


class Series:
    """One kernel under one configuration, run so often."""

    def __init__(self, opener: Opener, wanted: Wanted, options: dict[str, Any]) -> None:
        self.opener, self.wanted, self.options = opener, wanted, options
        self.kinds: list[Kind] = []
        self.runs: list[Run] = []
        self.tuning: list[dict[str, Any]] = []
        """Distinct accounts of what was launched, what did not compile and what tuners there are."""
        self._by_bits: dict[str, int] = {}
        self._base: Trial | None = None
        self._process = 0

    def run(self, bench: Bench, say: Say) -> RepeatResult:
        """All runs of the series, judged."""
        for _ in range(self.wanted.processes):
            runner = self.opener()
            info = runner.info
            try:
                self._one_process(bench, runner, info, say)
            finally:
                if self.wanted.processes > 1 and hasattr(runner, "close"):
                    runner.close()
            if self.hopeless:
                break
            self._process += 1
        return self._result(bench, info)

    def _one_process(self, bench: Bench, runner: Runner, info: KernelInfo, say: Say) -> None:
        on_gpu = str(info.environment.get("device", "cpu")).startswith("cuda")
        count = self.wanted.runs
        calls = [self._call(bench, busy=self.wanted.busy and on_gpu and n % 2 == 1) for n in range(count)]
        cold, at_once, done = self.wanted.cold, 1, 0
        while done < count:
            total = count * self.wanted.processes
            say(f"{bench.case.label}: {info.name}, run {len(self.runs) + 1}", len(self.runs), total)
            batch = calls[done : done + at_once]
            started = time.monotonic()
            for call, result in zip(batch, runner.run(batch), strict=True):
                cold = self._count(bench, info, call, result, cold)
            if self.hopeless:
                return
            done += len(batch)
            each = (time.monotonic() - started) / len(batch)
            at_once = max(1, min(LARGEST_BATCH, int(BATCH_SECONDS / max(each, 1e-3))))

    @property
    def hopeless(self) -> bool:
        """The first run was refused, or what was pinned does not compile: no other run will differ."""
        first = self.kinds[0]
        uncompiled = any("compile_failures" in account for account in self.tuning)
        return first.ruling.verdict == "skipped" or (uncompiled and not first.answered)

    @property
    def first_bits(self) -> str:
        """A name for the first answer's bits."""
        return next(iter(self._by_bits))

    def _call(self, bench: Bench, *, busy: bool) -> KernelCall:
        options = msgspec.structs.replace(bench.call.options, distinct=True, busy=busy, **self.options)
        return msgspec.structs.replace(bench.call, options=options)

    def _count(self, bench: Bench, info: KernelInfo, call: KernelCall, result: RunResult, cold: bool) -> bool:
        """Count one run; returns whether the next one is the first call of a process."""
        result = answered(call, result)
        bits = bits_of(result)
        number = self._by_bits.get(bits)
        if number is None:
            number = self._by_bits[bits] = len(self.kinds)
            self.kinds.append(self._new_kind(bench, info, result))
        self.kinds[number].runs += 1
        beside = bool(result.evidence.get("busy_stream"))
        self.runs.append(
            Run(process=self._process, cold=cold, busy=beside, kind=number, seconds=result.seconds)
        )
        account = {key: result.evidence[key] for key in ACCOUNT if key in result.evidence}
        if account and account not in self.tuning:
            self.tuning.append(account)
        lost = result.status in ("crash", "timeout")
        self._process += lost
        return lost

    def _new_kind(self, bench: Bench, info: KernelInfo, result: RunResult) -> Kind:
        kind = Kind(ruling=bench.rule(info, result), first=len(self.runs), answered=result.status == "ok")
        if kind.answered and not bench.misshapen(result):
            if self._base is None:
                self._base = bench.trial(info, result)
            else:
                kind.moved = bench.difference(self._base, result)
        return kind

    def _result(self, bench: Bench, info: KernelInfo) -> RepeatResult:
        found = ruled(info.contract, self.kinds, self.runs, self.wanted.confidence)
        launched: list[dict[str, str]] = []
        for account in self.tuning:
            if account.get("launched", {}) not in ({}, *launched):
                launched.append(account["launched"])
        case = bench.case
        return RepeatResult(
            kernel=info.name,
            case=str(case.path) if case.path is not None else case.label,
            layer=case.origin.layer,
            configuration={name: value for name, value in self.options.items() if value not in ({}, "stock")},
            verdict=found.verdict,
            reason=found.reason,
            place=found.place,
            tier=found.tier,
            rule=found.rule,
            kinds=tuple(self.kinds),
            all_runs=tuple(self.runs),
            rule_out=self.wanted.rule_out,
            confidence=self.wanted.confidence,
            launched=tuple(launched),
        )


def bits_of(result: RunResult) -> str:
    """A name for an answer: a hash of its outputs' bits, or its status and message."""
    if result.status != "ok":
        return f"{result.status}: {result.message}"
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(result.outputs):
        tensor: Tensor = result.outputs[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
