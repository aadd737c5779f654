"""What the tuners of a call go by, and what they draw when they are asked again.

The idea: a tuner's choice is made by a stopwatch, once per key, at whatever length comes first, and then
serves every length. So how often each configuration is drawn in fresh tunings, at the lengths at which
engines tune and at the case's own, says how many processes in production run on it.

Leaves to others: judging a configuration (`autotune_sweep`, the sweep's axis), forgetting a choice
(`kernels.autotune`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from ..capture.case import Case
from ..capture.errors import BadInput
from ..kernels.interface import KernelCall
from .axes.axis import on_gpu
from .cut import first_tokens
from .inputs import call_of
from .session import Runner

Say = Callable[..., None]
TUNED_AT = (16, 32, 64)
"""Tokens at which engines tune in their warm-up (vLLM 0.19.1, `_warmup_prefill_kernels`)."""


class Tuner(msgspec.Struct, frozen=True, kw_only=True):
    """A tuned kernel that the call launches (`kernels.tuning.tuner_facts`)."""

    kernel: str
    configurations: tuple[dict[str, Any], ...]
    key: tuple[str, ...] = ()
    """Arguments by which a choice is remembered, beside every tensor's dtype."""
    left_out: tuple[str, ...] = ()
    """Scalar arguments for whose values no choice is made: T, as a rule."""
    kept_on_disk: bool = False
    """The choice outlives the process: a new one does not draw again."""


class Tunings(msgspec.Struct, frozen=True, kw_only=True):
    """Fresh tunings at one length: how often each configuration was drawn."""

    tokens: int
    n: int
    """Tunings that came to an end."""
    picks: dict[str, dict[str, int]]
    """Kernel -> configuration -> times, the most frequent first."""


class TuningAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The tuners of one kernel on one case."""

    kernel: str
    case: str
    tuners: tuple[Tuner, ...]
    tunings: tuple[Tunings, ...] = ()
    not_covered: tuple[str, ...] = ()
    """Fresh tunings that were asked for and not made, and why."""


def check_tunings(n: int, tuned_at: Sequence[int]) -> None:
    """Arguments at the door. Raises BadInput."""
    if n < 0:
        raise BadInput(f"tunings is {n}; give 0 or more")
    wrong = [tokens for tokens in tuned_at if tokens < 1]
    if wrong:
        raise BadInput(f"tuned at {wrong[0]} tokens; give lengths of 1 or more")


def tuners_of(evidence: Sequence[dict[str, Any]]) -> list[Tuner]:
    """What the calls of a process told about the tuners that they passed."""
    return [
        msgspec.convert(facts, Tuner, strict=False) for one in evidence for facts in one.get("tuners", ())
    ]


def tuning_account(
    runner: Runner,
    case: Case,
    tuners: Sequence[Tuner],
    n: int,
    tuned_at: Sequence[int] = TUNED_AT,
    *,
    say: Say,
    late: Callable[[], bool] = lambda: False,
) -> TuningAccount:
    """`tune_afresh`, with the tuners themselves."""
    tables, left = tune_afresh(runner, case, tuners, n, tuned_at, say=say, late=late) if n else ([], [])
    return TuningAccount(
        kernel=runner.info.name,
        case=str(case.path) if case.path is not None else case.label,
        tuners=tuple(tuners),
        tunings=tuple(tables),
        not_covered=tuple(left),
    )


def tune_afresh(
    runner: Runner,
    case: Case,
    tuners: Sequence[Tuner],
    n: int,
    tuned_at: Sequence[int],
    *,
    say: Say,
    late: Callable[[], bool],
) -> tuple[list[Tunings], list[str]]:
    """Counts of what the tuners draw in n fresh tunings at each length and at the case's own; what is left.

    The lengths take turns, so that all of them share the machine's moods.
    """
    if not on_gpu(runner.info):
        return [], ["fresh tunings: a tuner times kernels on a GPU, and there is none"]
    if not tuners:
        return [], ["fresh tunings: the call launches no tuned kernel"]
    own = case.n_tokens
    calls = {
        length: _call_at(case, length) for length in (*dict.fromkeys(t for t in tuned_at if t < own), own)
    }
    picks = {length: {tuner.kernel: Counter[str]() for tuner in tuners} for length in calls}
    done = dict.fromkeys(calls, 0)
    reasons: dict[int, str] = {}
    for number in range(n):
        for length, call in calls.items():
            if late():
                reasons.setdefault(length, "the time is used up")
                continue
            say(f"fresh tuning {number + 1} of {n} at {length} tokens", number, n)
            result = runner.run([call])[0]
            if result.status != "ok":
                reasons[length] = result.message or result.status
                continue
            done[length] += 1
            for kernel, counter in picks[length].items():
                if kernel in result.evidence.get("launched", {}):
                    counter[result.evidence["launched"][kernel]] += 1
    left = [
        f"fresh tunings at {t} tokens: {done[t]} of {n} ({reasons.get(t, 'unknown')})"
        for t in calls
        if done[t] < n
    ]
    tables = [
        Tunings(
            tokens=length, n=done[length], picks={k: dict(c.most_common()) for k, c in picks[length].items()}
        )
        for length in calls
    ]
    return tables, left


def _call_at(case: Case, tokens: int) -> KernelCall:
    return call_of(case if tokens >= case.n_tokens else first_tokens(case, tokens), tune="fresh")


def in_lines(account: TuningAccount) -> Iterator[str]:
    """The account in sentences, for a report."""
    for tuner in account.tuners:
        key = ", ".join((*tuner.key, "every tensor's dtype"))
        missing = f", not by {', '.join(tuner.left_out)}" if tuner.left_out else ""
        kept = "; the choice is kept on disk" if tuner.kept_on_disk else ""
        count = len(tuner.configurations)
        yield f"{tuner.kernel}: {count} configurations, a choice is remembered by {key}{missing}{kept}"
        for table in account.tunings:
            picks = table.picks.get(tuner.kernel, {})
            if picks:
                shares = "; ".join(f"{times} of {table.n} {pick}" for pick, times in picks.items())
                yield f"  drawn at {table.tokens} tokens: {shares}"
    yield from account.not_covered
