"""`life`: histories of an engine's calls through kernels and a bookkeeper, every step checked.

The idea: history after history is drawn from the seed until so many steps are done or one goes wrong; a
failure is shrunk to the shortest history that shows it. `gdncheck.life` is `gdncheck life`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from ...capture.errors import BadInput
from ...kernels.pool import DEFAULT_TIME_LIMIT, KernelHandle, WorkerPool
from ..verdict import VERDICT_ORDER, VerdictWord, exit_status_of
from .bookkeeping import load_bookkeeper
from .draw import DRAFT, SLOTS, draw_history
from .machine import Machine, Reference
from .machine_kernels import KernelMachine
from .named import NAMED, named_history
from .planted import PLANTED
from .run import Failure, Told, run_history
from .shrink import shrink
from .steps import History, read_history
from .tokens import Sizes

REFERENCE = "reference"
STEPS_PER_HISTORY = 200
NAMED_LENGTHS = (9, 1, 17, 6)
MOST_TRIES = 400
FEW_RUNS = 2
"""Honest runs while a failure is shrunk; the shortest history is judged with all of them again."""
REFERENCE_RUNS = 3
"""Honest runs beside the reference, which is float64 inside and so errs far less than they do."""
STATUS_VERDICT: dict[str, VerdictWord] = {
    "fail": "fail", "error": "error", "crash": "error", "timeout": "timeout", "refused": "skipped",
}  # fmt: skip
STATE_DTYPES = ("float32", "bfloat16", "float16")
Say = Callable[..., None]


class LifeResult(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What came of one kernel."""

    kernel: str
    verdict: VerdictWord
    reason: str
    steps: int = 0
    calls: int = 0
    rows: int = 0
    tokens: int = 0
    histories: int = 0
    ratio: float = 0.0
    """Largest error in units of the honest one."""
    failure: Failure | None = None
    """In the shortest history that was found."""
    found_at: int | None = None
    """Step of the drawn history at which it showed first."""
    drawn: History | None = None
    """The history in which it showed first."""
    history: History | None = None
    """The shortest one."""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


class LifeReport(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All kernels."""

    results: tuple[LifeResult, ...]
    bookkeeper: str
    seed: int
    seconds: float
    command: str = ""

    @property
    def verdict(self) -> VerdictWord:
        words = {r.verdict for r in self.results}
        return next(w for w in VERDICT_ORDER if w in words)

    @property
    def exit_status(self) -> int:
        return exit_status_of((r.verdict for r in self.results), strict=False)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What is run, for every kernel alike."""

    bookkeeper: str
    steps: int
    seed: int
    history: str | None
    slots: int
    draft: int
    longest: int
    checkpoints: bool
    sizes: Sizes | None
    state_dtype: str


def life(
    kernels: Sequence[str] | None = None,
    *,
    decode: str | None = None,
    verify: str | None = None,
    conv: str | None = None,
    conv_update: str | None = None,
    bookkeeper: str = "sound",
    steps: int = 2000,
    seed: int = 0,
    history: str | Path | None = None,
    slots: int = SLOTS,
    draft: int = DRAFT,
    longest: int = 13,
    checkpoints: bool = True,
    k_heads: int | None = None,
    v_heads: int | None = None,
    dims: tuple[int, int] | None = None,
    dtype: str | None = None,
    state_dtype: str = "float32",
    device: str = "auto",
    time_limit: float = DEFAULT_TIME_LIMIT,
    progress: Say | None = None,
    command: str = "",
) -> LifeReport:
    """Run histories until `steps` steps are done or one goes wrong.

    kernels: each by itself, for the prefills and for every role that none of decode, verify, conv and
    conv_update names a kernel for; `reference` (the default) is the rule in float64 in this process.
    bookkeeper: sound, sound-clears, planted:NAME, or package.module:Class. history: a file, or a name of
    NAMED; None: drawn from the seed. longest: tokens of the longest prefill chunk that is drawn.
    checkpoints: whether calls leave checkpoints behind (the state then moves to another slot).
    Raises BadInput for an argument that makes no sense, CannotRun where a kernel cannot be loaded.
    """
    started = time.time()
    if state_dtype not in STATE_DTYPES:
        raise BadInput(f"state dtype {state_dtype!r}; give {', '.join(STATE_DTYPES)}")
    if steps < 1:
        raise BadInput(f"{steps} steps are none; give at least 1")
    if slots < 2 * draft + 4:
        raise BadInput(
            f"{slots} slots hold no two sequences with drafts of {draft}; give {2 * draft + 4} or more"
        )
    settings = Settings(
        bookkeeper=bookkeeper, steps=steps, seed=seed, history=None if history is None else str(history),
        slots=slots, draft=draft, longest=longest, checkpoints=checkpoints,
        sizes=_sizes(k_heads, v_heads, dims, dtype), state_dtype=state_dtype,
    )  # fmt: skip
    make_bookkeeper(bookkeeper)
    given = _given_history(settings)
    roles = {"decode": decode, "verify": verify, "conv": conv, "conv_update": conv_update}
    results = []
    with WorkerPool(device=device, time_limit=time_limit) as pool:
        opened: dict[str, KernelHandle] = {}
        for name in kernels or [REFERENCE]:
            played = players(name, roles, pool, opened)
            results.append(one_kernel(name, played, settings, given, progress))
    return LifeReport(
        results=tuple(results),
        bookkeeper=bookkeeper,
        seed=seed,
        seconds=time.time() - started,
        command=command,
    )


def _sizes(
    k_heads: int | None, v_heads: int | None, dims: tuple[int, int] | None, dtype: str | None
) -> Sizes | None:
    """What was asked for; None: nothing, so what suits the kernel."""
    if k_heads is None and v_heads is None and dims is None and dtype is None:
        return None
    default = KERNEL_SIZES
    key, value = dims or (default.key_dim, default.value_dim)
    found = Sizes(
        k_heads=k_heads or default.k_heads, v_heads=v_heads or default.v_heads, key_dim=key, value_dim=value,
        dtype=dtype or default.dtype,
    )  # fmt: skip
    if found.v_heads % found.k_heads or min(found.k_heads, key, value) < 1:
        raise BadInput(f"{found.v_heads} value heads cannot share {found.k_heads} key heads evenly")
    if found.dtype not in STATE_DTYPES:
        raise BadInput(f"dtype {dtype!r}; give {', '.join(STATE_DTYPES)}")
    return found


# Small enough for Triton's interpreter, large enough for the kernels that take K = V = 64 or 128 only.
KERNEL_SIZES = Sizes(k_heads=1, v_heads=2, key_dim=64, value_dim=64, dtype="bfloat16")


def make_bookkeeper(name: str) -> Callable[[int, int], Any]:
    """The bookkeeper of a name. Raises BadInput for an unknown one."""
    if name.startswith("planted:"):
        fault = name.removeprefix("planted:")
        if fault not in PLANTED:
            raise BadInput(f"bookkeeper {name}: no such fault is planted; there are {', '.join(PLANTED)}")
        return PLANTED[fault]
    made: Callable[[int, int], Any] = load_bookkeeper(name)
    return made


def _given_history(settings: Settings) -> History | None:
    if settings.history is None:
        return None
    if settings.history in NAMED:
        return named_history(settings.history, NAMED_LENGTHS, seed=settings.seed)
    if not Path(settings.history).exists():
        raise BadInput(f"history {settings.history}: no such file, nor a name of {', '.join(NAMED)}")
    return read_history(settings.history)


def players(
    name: str, roles: dict[str, str | None], pool: WorkerPool, opened: dict[str, KernelHandle]
) -> dict[str, KernelHandle]:
    """Role -> open kernel; empty for the reference. opened: kernels that are open already, by name."""
    if name == REFERENCE:
        other = next((f"{role} {kernel}" for role, kernel in roles.items() if kernel is not None), None)
        if other is not None:
            raise BadInput(
                f"the reference plays every role itself; give --kernel with --{other.replace('_', '-')}"
            )
        return {}
    for kernel in (name, *roles.values()):
        if kernel is not None and kernel not in opened:
            opened[kernel] = pool.open(kernel)
    played = {role: opened[kernel] for role, kernel in roles.items() if kernel is not None}
    played["prefill"] = opened[name]
    played.setdefault("decode", played["prefill"])
    played.setdefault("verify", played["decode"])
    return played


def one_kernel(
    name: str,
    played: dict[str, KernelHandle],
    settings: Settings,
    given: History | None,
    progress: Say | None = None,
) -> LifeResult:
    """Histories through one kernel, and the shortest that fails if one does."""
    started = time.time()
    machine: Machine = Reference(settings.sizes or Sizes())
    if played:
        infos = {role: handle.info for role, handle in played.items()}
        machine = KernelMachine(infos, settings.sizes or KERNEL_SIZES, getattr(torch, settings.state_dtype))
    bookkeeper = make_bookkeeper(settings.bookkeeper)
    options: dict[str, Any] = {
        "state_dtype": getattr(torch, settings.state_dtype),
        "answers": lambda role, call: played[role].run([call])[0],
    }
    if isinstance(machine, Reference):
        options["most_runs"] = REFERENCE_RUNS
    total: list[Told] = []
    done = number = 0
    drawn: History | None = None
    while done < settings.steps and (given is None or number == 0):
        n_steps = min(STEPS_PER_HISTORY, settings.steps - done)
        drawn = given or draw_history(
            settings.seed, number, n_steps, slots=settings.slots, draft=settings.draft,
            longest=settings.longest, checkpoints=settings.checkpoints,
        )  # fmt: skip
        if progress is not None:
            progress(f"{name}: {drawn.name}", done, settings.steps)
        told = run_history(drawn, machine, bookkeeper, **options)
        total.append(told)
        done, number = done + told.steps, number + 1
        if told.failure is not None:
            break
    assert drawn is not None
    failure = total[-1].failure
    kernel = name if isinstance(machine, Reference) else machine.info("prefill").name
    counts: dict[str, Any] = {
        "kernel": kernel, "steps": done, "calls": sum(t.calls for t in total),
        "rows": sum(t.rows for t in total), "tokens": sum(t.tokens for t in total), "histories": number,
        "ratio": max(t.worst_ratio for t in total),
        "notes": tuple(dict.fromkeys(note for t in total for note in t.notes)),
    }  # fmt: skip
    if failure is None:
        reason = (
            "every step as the ledger and each sequence's own truth have it: "
            f"{done} steps, {counts['calls']} calls"
        )
        return LifeResult(verdict="pass", reason=reason, seconds=time.time() - started, **counts)
    verdict = STATUS_VERDICT[failure.status]
    if verdict == "fail":
        short, again = shortest(drawn, failure, machine, bookkeeper, options, progress)
    else:
        short, again = drawn, failure
    return LifeResult(
        verdict=verdict, reason=again.line, failure=again, found_at=failure.step, drawn=drawn, history=short,
        seconds=time.time() - started, **counts,
    )  # fmt: skip


def shortest(
    drawn: History,
    failure: Failure,
    machine: Machine,
    bookkeeper: Callable[[int, int], Any],
    options: dict[str, Any],
    progress: Say | None,
) -> tuple[History, Failure]:
    """The shortest history that breaks the same rule, and how it fails."""
    by_ledger = failure.rule in LEDGER_RULES
    tries = 0

    def fails(history: History) -> bool:
        nonlocal tries
        tries += 1
        if tries > MOST_TRIES:
            return False
        if progress is not None:
            progress(f"shrinking: {len(history.steps)} steps", tries, MOST_TRIES)
        # What the ledger sees needs no truth, which is most of the work; what is far off, few honest runs.
        quick = {**options, "judged": not by_ledger, "most_runs": FEW_RUNS}
        told = run_history(history, machine, bookkeeper, **quick)
        return told.failure is not None and told.failure.rule == failure.rule

    short = shrink(drawn, fails, last=failure.step)
    again = run_history(short, machine, bookkeeper, **options).failure
    if again is None or again.rule != failure.rule:
        return drawn, failure  # it does not come back: a kernel that fails now and then
    return short, again


LEDGER_RULES = frozenset({"read", "position", "content", "unowned", "owner", "plan"})

__all__ = ["LifeReport", "LifeResult", "life"]
