"""A kernel on a fixed list of cases, for a test suite: the first failure, shrunk, and what replays it.

The idea: a kernel's author wants a test that is the same on every machine and every day, ends within a budget
of cases, and when it fails hands over something small. A case is a function of (seed, number) alone; lengths
lie where kernels break (1 to 4 tokens, next to multiples of 16 and 64), and some prefills are cut into calls.
The kernel runs in a worker process, so that a crash or a hang is a failed test and not the end of the suite.

Leaves to others: long runs with feedback, a store and several processes (`fuzz`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..capture.case import Case
from ..capture.casefile import write_case
from ..capture.errors import BadInput
from ..capture.make import FAMILIES, make
from ..kernels.pool import WorkerPool
from ..kernels.protocol import KernelSpec
from .diff import verdict_device
from .finding import facts_of, with_facts
from .report_words import full
from .shrink import Shrunk, shrink
from .shrink.candidate import Candidate
from .shrink.oracle import Oracle
from .shrink.result import words_of
from .shrink.signature import fault_of, signature_of
from .sweep.attempt import Attempt
from .sweep.configuration import in_words
from .verdict import FAILING

# Families that lie in every kernel's domain.
USUAL_FAMILIES = (
    "qwen", "gaussian", "long-memory", "parallel-keys", "mixed-decay", "no-decay", "tiny-decay", "exact",
)  # fmt: skip
SPLITS = ("at-1", "at-15", "at-16", "at-63", "at-64", "at-65", "at-T-1")
DEFAULT_DIRECTORY = ".gdncheck"
LOADING = 300.0  # seconds that a kernel may take to load


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the cases are drawn from."""

    seed: int = 0
    families: tuple[str, ...] = USUAL_FAMILIES
    dims: tuple[tuple[int, int], ...] = ((32, 32), (64, 64))
    """(K, V)."""
    heads: tuple[tuple[int, int], ...] = ((1, 1), (1, 2), (2, 4))
    """(key heads, value heads)."""
    dtypes: tuple[str, ...] = ("bf16",)
    max_tokens: int = 200
    splits: bool = True
    """Cut some prefills into calls that hand the state on."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The first case that fails."""

    number: int
    attempt: Attempt
    signature: str
    path: Path
    """The shrunk case, or the case itself where it could not be shrunk."""
    shrunk: Shrunk | None = None
    note: str = ""
    """Why it is not shrunk."""
    words: str
    """The smallest case, in words."""
    deviations: dict[str, str] = {}


class Tried(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What came of the list."""

    kernel: str
    cases: int
    """Cases that were run."""
    skipped: int = 0
    """Of these, the ones that the kernel refused."""
    failure: Failure | None = None
    folder: str = ""
    """Where a kernel by import path lies, if that is not where modules are found anyway."""
    seconds: float = 0.0

    def message(self) -> str:
        """What a failing test prints; empty where nothing failed."""
        found = self.failure
        if found is None:
            return ""
        a = found.attempt
        place = "" if a.place is None else f", {full(a.place)}"
        smallest = f"{found.words}, {in_words(found.deviations)}"
        lines = [f"{self.kernel}: {a.verdict}{place} at case {found.number} ({smallest})", f"  {a.reason}"]
        if found.shrunk is not None and found.shrunk.neighbour is not None:
            near = found.shrunk.neighbour
            lines.append(f"  passes: {words_of(near.case)}, {in_words(near.deviations)} ({near.change})")
        if found.note:
            lines.append(f"  {found.note}")
        lines.append(f"  case: {found.path}")
        variable = f"PYTHONPATH={self.folder} " if self.folder else ""
        lines.append(f"  replay: {variable}gdncheck replay {found.path}")
        return "\n".join(lines)


def plan_of(
    *,
    seed: int = 0,
    families: Sequence[str] | None = None,
    dims: Sequence[Any] | None = None,
    heads: Sequence[Any] | None = None,
    dtypes: Sequence[str] | None = None,
    max_tokens: int = 200,
    splits: bool = True,
) -> Plan:
    """Check what a test asked for. dims, heads: one pair or several. Raises BadInput."""
    unknown = sorted(set(families or ()) - set(FAMILIES))
    if unknown:
        raise BadInput(f"family {unknown[0]!r} is unknown; families: {', '.join(FAMILIES)}")
    if max_tokens < 1:
        raise BadInput(f"max_tokens is {max_tokens}; give 1 or more")
    given: dict[str, Any] = {"seed": seed, "max_tokens": max_tokens, "splits": splits}
    for name, value in (("families", families), ("dtypes", dtypes)):
        if value:
            given[name] = tuple(value)
    for name, pairs in (("dims", dims), ("heads", heads)):
        if pairs:
            given[name] = pairs_of(name, pairs)
    return Plan(**given)


def pairs_of(name: str, pairs: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """(64, 64) or [(64, 64), (128, 128)] as pairs."""
    several = [pairs] if len(pairs) == 2 and all(isinstance(n, int) for n in pairs) else list(pairs)
    if not several or not all(_is_pair(pair) for pair in several):
        raise BadInput(f"{name} is {pairs!r}; give a pair of numbers such as (64, 64), or several pairs")
    return tuple((int(a), int(b)) for a, b in several)


def _is_pair(pair: Any) -> bool:
    return (
        isinstance(pair, tuple | list)
        and len(pair) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in pair)
    )


def case_of(plan: Plan, number: int) -> tuple[Case, dict[str, str]]:
    """Case `number` and its deviations: the same everywhere for one plan."""
    dice = random.Random(f"{plan.seed}:{number}")
    lengths = [_length(dice, plan.max_tokens) for _ in range(dice.choice((1, 1, 1, 2, 3)))]
    while sum(lengths) > plan.max_tokens and len(lengths) > 1:
        lengths.pop()
    k_heads, v_heads = dice.choice(plan.heads)
    case = make(
        dice.choice(plan.families),
        lengths=lengths,
        k_heads=k_heads,
        v_heads=v_heads,
        dims=dice.choice(plan.dims),
        dtype=dice.choice(plan.dtypes),
        state=dice.choice(("none", "random", "random", "zeros")),
        seed=dice.randrange(2**31),
    )
    deviations = {}
    if plan.splits and dice.random() < 0.4 and max(lengths) > 1:
        fitting = [word for word in SPLITS if word == "at-T-1" or int(word[3:]) < max(lengths)]
        deviations["split"] = dice.choice(fitting)
    return case, deviations


def _length(dice: random.Random, most: int) -> int:
    """Few tokens, next to a multiple of 64 or of 16, or any number."""
    kind = dice.random()
    if kind < 0.2:
        length = dice.randint(1, 4)
    elif kind < 0.65:
        length = 64 * dice.randint(1, max(1, most // 64)) + dice.choice((-1, 0, 1))
    elif kind < 0.85:
        length = 16 * dice.randint(1, max(1, most // 16)) + dice.choice((-1, 0, 1))
    else:
        length = dice.randint(1, most)
    return max(1, min(length, most))


def try_cases(
    kernel: str | KernelSpec,
    *,
    cases: int = 50,
    plan: Plan | None = None,
    shrink_seconds: float = 60.0,
    directory: Path | str = DEFAULT_DIRECTORY,
    device: str = "auto",
    time_limit: float = 60.0,
    report: Callable[..., None] | None = None,
) -> Tried:
    """Run a kernel on the first `cases` cases of a plan, up to the first failure, which is shrunk.

    shrink_seconds: budget for that; 0: keep the case as it is. directory: where the failing case is kept.
    Raises BadInput for a wrong argument, CannotRun where the kernel cannot be loaded.
    """
    if cases < 1:
        raise BadInput(f"cases is {cases}; give 1 or more")
    started, plan = time.monotonic(), plan or Plan()
    say = report or (lambda *words: None)
    skipped, folder = 0, "" if isinstance(kernel, str) else ":".join(kernel.sys_path)
    with WorkerPool(device=device, time_limit=max(time_limit, LOADING)) as workers:
        handle = workers.open(kernel)
        for number in range(cases):
            case, deviations = case_of(plan, number)
            say(f"{handle.name}: case {number} of {cases}", number, cases)
            oracle = Oracle(
                workers, handle, case, verdict_device=verdict_device(device), seed=plan.seed,
                time_limit=time_limit,
            )  # fmt: skip
            attempt = oracle.see(Candidate(case, deviations), fully=True)
            skipped += attempt.verdict == "skipped"
            if attempt.verdict in FAILING:
                failure = _failure(
                    number, oracle, Candidate(case, deviations), attempt, shrink_seconds, Path(directory), say
                )
                return Tried(
                    kernel=handle.name, cases=number + 1, skipped=skipped, failure=failure, folder=folder,
                    seconds=time.monotonic() - started,
                )  # fmt: skip
        name = handle.name
    return Tried(kernel=name, cases=cases, skipped=skipped, seconds=time.monotonic() - started)


def _failure(
    number: int,
    oracle: Oracle,
    found: Candidate,
    attempt: Attempt,
    seconds: float,
    directory: Path,
    say: Callable[..., None],
) -> Failure:
    """Shrink a failing case and keep it under its signature."""
    signature = signature_of(attempt, oracle.info, oracle.chunk_size)
    path = directory / f"{signature.digest}.safetensors"
    note = ""
    if seconds > 0:
        try:
            shrunk = shrink(
                found.case, oracle.limited.handle, signature=signature, deviations=found.deviations,
                budget=seconds, seed=oracle.seed, report=say, out=path, time_limit=oracle.limited.longest,
            )  # fmt: skip
            return Failure(
                number=number, attempt=shrunk.attempt, signature=signature.digest, path=path, shrunk=shrunk,
                words=shrunk.words, deviations=shrunk.deviations,
            )  # fmt: skip
        except BadInput as error:
            note = f"not shrunk: {error}"
    fault = fault_of(attempt, oracle.chunk_size)
    facts = facts_of(
        oracle.info, attempt, kind="" if fault is None else fault.kind, signature=signature.digest,
        deviations=found.deviations, seed=oracle.seed, time_limit=oracle.limited.longest,
        place_pattern="" if fault is None else fault.pattern,
    )  # fmt: skip
    write_case(with_facts(found.case, facts), path)
    return Failure(
        number=number, attempt=attempt, signature=signature.digest, path=path, note=note,
        words=words_of(found.case), deviations=found.deviations,
    )  # fmt: skip
