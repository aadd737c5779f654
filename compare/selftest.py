"""selftest: planted faults on this machine, through real workers; proof that the tool sees.

The idea: each fault has a check that must find it and the place where it was planted, and a sound twin that
the same check must pass. One fault per tier, one per family of axes, those in time, and those that take a
process along; a check that misses its fault, blames another place, or blames the twin, fails the selftest.

Leaves to others: the faults themselves (`kernels.planted`), the checks (`session`, `sweep`, `repeats`,
`autotune_sweep`), which are called as the commands call them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import torch

from ..capture.case import Case
from ..capture.errors import CannotRun
from ..capture.make import make
from ..kernels.interface import KernelCall, KernelInfo, RunResult
from ..kernels.planted import HEAD, SEQUENCE, TOKEN
from ..kernels.pool import KernelHandle, WorkerPool
from .autotune_sweep import AutotuneReport, autotune_sweep
from .axes.axis import Situation
from .checks import nonfinite
from .repeat_result import RepeatResult
from .repeats import Bench, Series, Wanted
from .report_words import full
from .session import Settings, diff_one
from .soundness import soundness_of
from .sweep.baseline import baseline_for
from .sweep.configuration import configuration_of
from .sweep.judging import Judge
from .sweep.kernel_runs import KernelRuns
from .threads import one_thread
from .verdict import Place
from .witness import Witness

Say = Callable[..., None]
KERNEL = "gdncheck.kernels.planted:rule"
TUNED = "gdncheck.kernels.planted_triton:rule"
LENGTHS = (70, 1, 66)
EXACT_LENGTHS = (20, 9, 12)
HANG_SECONDS = 3.0
REPEATS = 8


class Planted(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, the check that must find it and what that check must say."""

    fault: str
    family: str
    """Tier, axis, or what else it stands for."""
    by: Literal["diff", "relation", "axis", "repeat", "worker", "input", "autotune"]
    says: tuple[str, ...] = ()
    """Rules or relations, one of which must fire; for an axis its value."""
    place: Literal["token", "head", "sequence", "any"] = "any"
    """How far the named place must be the planted one."""
    case: str = "qwen"


PLANTED = (
    Planted(fault="values-swapped", family="tier 0: exact", by="diff", says=("exact",), case="exact"),
    Planted(fault="one-nan", family="tier 1: non-finite", by="diff", says=(nonfinite.NAME,), place="token"),
    Planted(
        fault="state-too-large", family="tier 1: state bound", by="diff", says=("state-bound",), place="head",
    ),
    Planted(fault="bad-input", family="tier 1: domain", by="input", says=("domain",)),
    Planted(
        fault="tail-not-in-state", family="tier 2: running bound", by="diff",
        says=("running-bound", "emulation-ratio"), place="sequence",
    ),
    Planted(
        fault="one-chunk-off", family="tier 3: ratio", by="diff", says=("emulation-ratio",), place="head"
    ),
    Planted(fault="state-rounded", family="tier 3: low bits", by="diff", says=("low-bits",)),
    Planted(fault="future-leaks", family="tier 4: causality", by="relation", says=("causality",)),
    Planted(fault="neighbour-leaks", family="tier 4: isolation", by="relation", says=("isolation",)),
    Planted(fault="wrong-chunk-32", family="axis chunk_size", by="axis", says=("32",), place="token"),
    Planted(fault="after-64n+1", family="axis split", by="axis", says=("at-64n+1",)),
    Planted(fault="poisoned-neighbour", family="axis packing", by="axis", says=("poisoned",)),
    Planted(fault="stale-slot", family="axis state", by="axis", says=("stale",)),
    Planted(fault="wrong-bf16-state", family="axis state_dtype", by="axis", says=("bfloat16",)),
    Planted(fault="wrong-fp16", family="axis input_dtype", by="axis", says=("fp16",), place="token"),
    Planted(fault="row-not-written", family="axis memory", by="axis", says=("nan",), place="token"),
    Planted(fault="one-head-left", family="axis heads", by="axis", says=("tp2",), case="two-key-heads"),
    Planted(fault="first-call", family="axis repeat: first", by="repeat", says=("first",), place="token"),
    Planted(
        fault="every-fourth-call", family="axis repeat: rate", by="repeat", says=("rate",), place="token"
    ),
    Planted(
        fault="bits-move", family="tier 4: run to run", by="repeat", says=("run-to-run",), place="token"
    ),
    Planted(fault="bad-configuration", family="axis autotune", by="autotune", says=("BLOCK=128",)),
    Planted(fault="crash", family="worker: crash", by="worker", says=("error",)),
    Planted(fault="hang", family="worker: hang", by="worker", says=("timeout",)),
)  # fmt: skip


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one planted fault."""

    fault: str
    family: str
    found: bool
    twin_sound: bool
    found_by: str
    """The rule, relation, configuration or status, and the place."""
    why: str = ""
    """What went wrong where it was not found, or where its twin was blamed."""
    skipped: bool = False
    """The check could not run here."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.skipped or (self.found and self.twin_sound)


class SelftestReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of them."""

    lines: tuple[Line, ...]
    device: str
    seconds: float = 0.0
    command: str = ""

    @property
    def exit_status(self) -> int:
        return int(not all(line.ok for line in self.lines))

    @property
    def verdict(self) -> str:
        return "fail" if self.exit_status else "pass"


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a check said about one kernel: whether it blames it, in which words, and where."""

    blamed: bool
    words: tuple[str, ...] = ()
    place: Place | None = None
    reason: str = ""


class WithFault:
    """The shared worker, every call of which asks for one fault (or none, for the twin)."""

    def __init__(self, handle: KernelHandle, fault: str) -> None:
        self._handle, self.fault = handle, fault
        self.spec, self.device, self.time_limit = handle.spec, handle.device, handle.time_limit

    @property
    def info(self) -> KernelInfo:
        return self._handle.info

    def run(self, calls: list[KernelCall], **how: Any) -> list[RunResult]:
        extra = {"fault": self.fault} if self.fault else {}
        asked = [
            msgspec.structs.replace(c, options=msgspec.structs.replace(c.options, extra=extra)) for c in calls
        ]
        return self._handle.run(asked, **how)


class Selftest:
    """The open worker, the cases and the checks."""

    def __init__(self, pool: WorkerPool, device: str, seed: int) -> None:
        self.pool, self.device, self.seed = pool, device, seed
        self.handle = pool.begin(KERNEL)
        self.judge = Judge("cpu", seed)
        self._cases: dict[str, Case] = {}
        self._twins: dict[tuple[Any, ...], Found] = {}
        self._tuned: AutotuneReport | None = None

    def case(self, family: str) -> Case:
        if family not in self._cases:
            name, k_heads = ("qwen", 2) if family == "two-key-heads" else (family, 1)
            self._cases[family] = make(
                name, lengths=EXACT_LENGTHS if family == "exact" else LENGTHS, k_heads=k_heads, v_heads=2,
                dims=(32, 32), state="random", seed=self.seed,
            )  # fmt: skip
        return self._cases[family]

    def line(self, planted: Planted) -> Line:
        """Plant, check, and check the twin."""
        started = time.monotonic()
        check: Callable[[Planted, str], Found] = getattr(self, f"by_{planted.by}")
        try:
            found = check(planted, planted.fault)
            key = (planted.by, planted.family if planted.by == "axis" else "", planted.case)
            if key not in self._twins:
                self._twins[key] = check(planted, "")
            twin = self._twins[key]
        except CannotRun as error:
            return self._skipped(planted, str(error), started)
        seen = found.blamed and bool(set(found.words) & set(planted.says))
        seen = seen and _at_the_place(planted, found.place)
        where = "" if found.place is None else f" at {full(found.place)}"
        why = "" if seen else f"not as planted: {found.reason or 'nothing was found'}{where}"
        if twin.blamed:
            why = f"{why}; the sound twin is blamed: {twin.reason}".removeprefix("; ")
        word = next((word for word in planted.says if word in found.words), "-")
        return Line(
            fault=planted.fault, family=planted.family, found=seen, twin_sound=not twin.blamed,
            found_by=f"{planted.by}: {word}{where}" if seen else "-", why=why,
            seconds=time.monotonic() - started,
        )  # fmt: skip

    def _skipped(self, planted: Planted, reason: str, started: float) -> Line:
        """Something that the check needs (Triton, say) is not here; the selftest shows less, and says so."""
        return Line(
            fault=planted.fault, family=planted.family, found=False, twin_sound=True, skipped=True,
            found_by="-", why=f"skipped: {reason}", seconds=time.monotonic() - started,
        )  # fmt: skip

    def _diff(self, case: Case, fault: str, relations: Literal["none", "quick"]) -> Found:
        witness = Witness(case, device="cpu", seed=self.seed)
        runner = WithFault(self.handle, fault)
        result = diff_one(runner, witness, soundness_of(witness), Settings(relations=relations))
        ruling = result.ruling
        fired = tuple(o.check for o in ruling.outcomes if o.status == "fires")
        return Found(
            blamed=ruling.verdict != "pass",
            words=(ruling.rule or "", *fired),
            place=ruling.first_nonfinite or ruling.worst_tile,
            reason=f"{ruling.verdict}: {ruling.reason}",
        )

    def by_diff(self, planted: Planted, fault: str) -> Found:
        """One call against the truth."""
        return self._diff(self.case(planted.case), fault, "none")

    def by_relation(self, planted: Planted, fault: str) -> Found:
        """Further calls of changed input; the relation itself must fire, whatever else does."""
        return self._diff(self.case(planted.case), fault, "quick")

    def by_input(self, planted: Planted, fault: str) -> Found:
        """A NaN in k, and a sound kernel: the input is to blame. The twin is the same input whole."""
        case = self.case(planted.case)
        if not fault:
            return self._diff(case, "", "none")
        k = case["k"].clone()
        k[LENGTHS[0] + LENGTHS[1] + TOKEN] = torch.nan
        found = self._diff(case.with_tensors(k=k), "", "none")
        right = found.reason.startswith("out-of-contract") and "k" in found.reason
        return msgspec.structs.replace(found, blamed=right, place=None)

    def by_axis(self, planted: Planted, fault: str) -> Found:
        """The baseline passes and the one changed axis does not."""
        case = self.case(planted.case)
        situation = Situation(case=case, info=self.handle.info, seed=self.seed)
        baseline, _ = baseline_for({}, situation)
        runner: Any = WithFault(self.handle, fault)
        runs = KernelRuns(self.pool, runner, situation, baseline, self.judge)
        before = runs.attempt(baseline)
        if before.verdict != "pass":
            return Found(blamed=not fault, reason=f"the baseline: {before.reason}")
        axis = planted.family.removeprefix("axis ")
        found = runs.attempt(configuration_of({axis: planted.says[0]}, baseline))
        if found.verdict == "skipped":
            return Found(blamed=not fault, reason=found.reason)
        place = found.place
        if place is not None and found.own_sequences and place.sequence in found.own_sequences:
            place = msgspec.structs.replace(place, sequence=found.own_sequences.index(place.sequence))
        return Found(blamed=found.failed, words=planted.says, place=place, reason=found.reason)

    def by_repeat(self, planted: Planted, fault: str) -> Found:
        """The same call again and again in one process."""
        runner = WithFault(self.handle, fault)
        series = Series(lambda: runner, Wanted(runs=REPEATS, busy=False), {})
        result = series.run(Bench(self.case(planted.case), "cpu", self.seed), lambda *args: None)
        return Found(
            blamed=result.verdict != "pass", words=tuple(_pattern(result)), place=result.place,
            reason=result.reason,
        )  # fmt: skip

    def by_autotune(self, planted: Planted, fault: str) -> Found:
        """Each configuration of a tuned Triton kernel pinned; the twin is its two other configurations."""
        if self._tuned is None:
            self._tuned = autotune_sweep(
                self.case(planted.case), TUNED, runs=2, device=self.device, time_limit=60, seed=self.seed
            )
        report = self._tuned
        failing = [pin for pin in report.pinned if pin.failed]
        words = tuple(f"BLOCK={pin.configuration['BLOCK']}" for pin in failing)
        if not fault:
            return Found(
                blamed=len(failing) > 1 or report.baseline.verdict != "pass", reason=", ".join(words)
            )
        place = failing[0].result.place if failing and failing[0].result else None
        return Found(blamed=bool(failing), words=words, place=place, reason=report.baseline.reason)

    def by_worker(self, planted: Planted, fault: str) -> Found:
        """A process that dies or hangs: told as such, and the next call is answered."""
        call = Bench(self.case(planted.case), "cpu", self.seed).call
        result = WithFault(self.handle, fault).run(
            [call], time_limit=HANG_SECONDS if fault == "hang" else None
        )
        if not fault:
            return Found(blamed=result[0].status != "ok", reason=result[0].message or "")
        after = WithFault(self.handle, "").run([call])[0]
        words = {"crash": "error", "timeout": "timeout"}.get(result[0].status, result[0].status)
        reason = result[0].message or ""
        if after.status != "ok":
            return Found(blamed=False, reason=f"{reason}; the next call was not answered: {after.message}")
        named = "SIGSEGV" in reason or result[0].status == "timeout"
        return Found(blamed=named, words=(words,), reason=reason)


def _pattern(result: RepeatResult) -> list[str]:
    """Which of the patterns in time the runs show."""
    words = [result.rule or ""]
    failed = [result.kinds[run.kind].failed for run in result.all_runs]
    if failed[0] and not any(failed[1:]):
        words.append("first")
    if any(failed[1:]) and result.failures == REPEATS // 4:
        words.append("rate")
    return words


def _at_the_place(planted: Planted, place: Place | None) -> bool:
    """Whether the place that was named is the planted one, as exactly as this fault asks."""
    if planted.place == "any":
        return True
    if place is None or place.sequence != SEQUENCE:
        return False
    if planted.place == "sequence":
        return True
    if place.head != HEAD:
        return False
    return planted.place == "head" or place.token == TOKEN


def selftest(
    *, device: str = "auto", seed: int = 0, progress: Say | None = None, command: str = ""
) -> SelftestReport:
    """Plant every fault on a device and see whether it is found. Raises CannotRun where no worker starts."""
    started = time.monotonic()
    say: Say = progress or (lambda *args: None)
    lines = []
    with WorkerPool(device=device, time_limit=120) as pool, one_thread():
        test = Selftest(pool, device, seed)
        for number, planted in enumerate(PLANTED):
            say(f"{planted.family}: {planted.fault}", number, len(PLANTED))
            lines.append(test.line(planted))
        ran_on = str(test.handle.info.environment.get("device", device))
    return SelftestReport(
        lines=tuple(lines), device=ran_on, seconds=time.monotonic() - started, command=command
    )
