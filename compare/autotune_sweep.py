"""Autotune: every configuration of every tuned kernel that a call launches, pinned in turn, repeated, judged.

The idea: a tuner's choice is made by a stopwatch, once, at some length, and then serves every length; so each
configuration must be right by itself. The call is run once with nothing tuned, its evidence lists the tuners
that it passed, and then each configuration is pinned while the other kernels keep the baseline's. What does
not compile is no wrong result: the tuner would never have chosen it. Fresh tunings, where a GPU is there to
time them, say how often each is drawn at the lengths at which engines tune and at the case's own.

Leaves to others: judging and counting (`repeats`), making the worker launch a pin (`kernels.autotune`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..capture.case import Case
from ..capture.errors import BadInput, CannotRun
from ..kernels.interface import KernelInfo
from ..kernels.pool import KernelHandle, WorkerPool
from .axes.autotune import WORD, blockings, pins_of, word_of
from .axes.axis import on_gpu
from .diff import cases_of, verdict_device
from .repeat_result import RepeatResult
from .repeats import Bench, Pins, Series, Wanted
from .threads import threads_for
from .tunings import TUNED_AT, Say, Tuner, Tunings, check_tunings, tune_afresh, tuners_of
from .verdict import FAILING, VERDICT_ORDER, VerdictWord


def pins_from(words: Iterable[str]) -> Pins:
    """Pins as typed, `KERNEL:BK=64+num_warps=4`, by kernel. Raises BadInput for a word that is none."""
    pins: Pins = {}
    for word in words:
        if not WORD.fullmatch(word):
            raise BadInput(
                f"pin {word!r}: write KERNEL:NAME=NUMBER+NAME=NUMBER, as kkt_kernel:BK=64+num_warps=4"
            )
        for kernel, pin in pins_of(word).items():
            pins[kernel] = {**pins.get(kernel, {}), **pin}
    return pins


class Pinned(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration of one kernel."""

    kernel: str
    configuration: dict[str, Any]
    outcome: Literal["ran", "compile failure", "not launched"]
    verdict: VerdictWord
    reason: str
    result: RepeatResult | None = None
    """Its repeats; None where it never ran."""
    same_bits: bool | None = None
    """As the baseline's first answer."""

    @property
    def failed(self) -> bool:
        return self.outcome == "ran" and self.verdict in FAILING


class AutotuneReport(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel on one case."""

    kernel: str
    case: str
    tuners: tuple[Tuner, ...]
    baseline: RepeatResult
    """With the first configuration of each kernel that the device can hold; nothing was tuned."""
    pinned: tuple[Pinned, ...]
    tunings: tuple[Tunings, ...] = ()
    not_covered: tuple[str, ...] = ()
    """What was left out, and why."""
    seconds: float = 0.0

    @property
    def verdict(self) -> VerdictWord:
        """The worst of the baseline and of every pin that ran; a compile failure is none."""
        words = {self.baseline.verdict, *(p.verdict for p in self.pinned if p.outcome == "ran")}
        return next(word for word in VERDICT_ORDER if word in words)

    @property
    def first_failing(self) -> Pinned | None:
        return next((p for p in self.pinned if p.failed), None)

    def drawn(self, pin: Pinned) -> dict[int, float]:
        """Tokens -> share of the fresh tunings there that drew this configuration."""
        word = _described(pin.configuration)
        return {t.tokens: t.picks.get(pin.kernel, {}).get(word, 0) / t.n for t in self.tunings if t.n}


def autotune_sweep(
    case: Case | Path | str,
    kernel: str,
    *,
    only: Sequence[str] = (),
    runs: int = 40,
    tunings: int = 0,
    tuned_at: Sequence[int] = TUNED_AT,
    device: str = "auto",
    time_limit: float = 300.0,
    budget: float | None = None,
    seed: int = 0,
    progress: Say | None = None,
) -> AutotuneReport:
    """Pin each configuration of each tuned kernel in turn and repeat the call under it.

    only: names of Triton kernels; empty: all that the call launches. runs: repeats per pin. tunings: fresh
    tunings at each length of `tuned_at` and at the case's own (a GPU is needed). budget: seconds after which
    no further pin is begun; what is left out is named.
    Raises BadInput for a wrong case, name or number, CannotRun where the call launches no tuned kernel.
    """
    started = time.monotonic()
    check_tunings(tunings, tuned_at)
    fresh: list[Tunings] = []
    say: Say = progress or (lambda *args: None)
    one = next(iter(cases_of(case, None, "captures", None)))
    with WorkerPool(device=device, time_limit=time_limit) as pool, threads_for(one["v"].numel()):
        handle = pool.open(kernel)
        bench = Bench(one, verdict_device(device), seed)
        wanted = Wanted(runs=runs)
        baseline = Series(lambda: handle, wanted, {"tune": "never"})
        first = baseline.run(bench, say)
        wanted = msgspec.structs.replace(wanted, cold=False)
        tuners = [t for t in tuners_of(baseline.tuning) if not only or t.kernel in only]
        _check_tuners(handle.info, first, tuners, only)
        late = partial(_late, started, budget)
        pinned, left = _pin_each(handle, bench, wanted, tuners, baseline, say, late)
        unsaid = ["fresh tunings: not asked for"]
        if tunings:
            fresh, unsaid = tune_afresh(handle, bench.case, tuners, tunings, tuned_at, say=say, late=late)
        return AutotuneReport(
            kernel=handle.info.name, case=first.case, tuners=tuple(tuners), baseline=first,
            pinned=tuple(pinned), tunings=tuple(fresh), not_covered=(*left, *unsaid),
            seconds=time.monotonic() - started,
        )  # fmt: skip


def _late(started: float, budget: float | None) -> bool:
    return budget is not None and time.monotonic() - started > budget


def _check_tuners(
    info: KernelInfo, first: RepeatResult, tuners: Sequence[Tuner], only: Sequence[str]
) -> None:
    if tuners:
        return
    if first.verdict in ("error", "timeout", "skipped"):
        raise CannotRun(f"{info.name} did not answer, so nothing is known of its tuners: {first.reason}")
    what = f"none of {', '.join(only)}" if only else "no autotuned Triton kernel"
    raise CannotRun(f"{info.name} launches {what} on this case; gdncheck kernels shows what it is")


def _pin_each(
    handle: KernelHandle,
    bench: Bench,
    wanted: Wanted,
    tuners: Sequence[Tuner],
    baseline: Series,
    say: Say,
    late: Callable[[], bool],
) -> tuple[list[Pinned], list[str]]:
    interpreted = not on_gpu(handle.info)
    found: list[Pinned] = []
    left: list[str] = []
    for tuner in tuners:
        pins = blockings(tuner.configurations) if interpreted else list(tuner.configurations)
        if interpreted and len(pins) < len(tuner.configurations):
            left.append(
                f"{tuner.kernel}: {len(tuner.configurations)} configurations, of which the interpreter tells "
                f"{len(pins)} apart (warps and stages mean nothing there)"
            )
        for number, pin in enumerate(pins):
            if late():
                left.append(f"{tuner.kernel}: {len(pins) - number} of {len(pins)} pins, the time is used up")
                break
            say(f"{tuner.kernel}: {_described(pin)}", number, len(pins))
            found.append(_one_pin(handle, bench, wanted, tuner.kernel, pin, baseline, say))
    return found, left


def _one_pin(
    handle: KernelHandle,
    bench: Bench,
    wanted: Wanted,
    kernel: str,
    pin: dict[str, Any],
    baseline: Series,
    say: Say,
) -> Pinned:
    series = Series(lambda: handle, wanted, {"tune": "never", "pins": {kernel: pin}})
    result = series.run(bench, say)
    failures = [one["compile_failures"] for one in series.tuning if kernel in one.get("compile_failures", {})]
    launched = any(kernel in one.get("launched", {}) for one in series.tuning)
    common: dict[str, Any] = {"kernel": kernel, "configuration": pin}
    if failures and not launched:
        return Pinned(**common, outcome="compile failure", verdict="skipped", reason=failures[0][kernel])
    if not launched and result.verdict not in ("error", "timeout"):
        return Pinned(
            **common, outcome="not launched", verdict="skipped", reason="the call did not launch this pin"
        )
    return Pinned(
        **common, outcome="ran", verdict=result.verdict, reason=result.reason, result=result,
        same_bits=series.first_bits == baseline.first_bits,
    )  # fmt: skip


def _described(pin: dict[str, Any]) -> str:
    """As `kernels.autotune.describe` writes a configuration."""
    return ", ".join(f"{name}={value}" for name, value in pin.items())


def pin_word(pin: Pinned) -> str:
    """As --pin takes it."""
    return word_of(pin.kernel, pin.configuration)
