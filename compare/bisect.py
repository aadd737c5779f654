"""Bisect a kernel's releases: the first, in release order, whose verdict on a case is another.

The idea: the two ends are judged first, since a search between two that agree finds nothing but noise.
Then it halves: a release that answers as the good end does belongs to its side, one that answers otherwise
to the bad end's, and one that gives no answer here (cannot be fetched, loaded or interpreted) is passed
over, as `git bisect skip` does. What was passed over beside the change is named: it may be any of those.
As with git, an answer that changed and changed back in between may be found at either place.

Leaves to others: which releases there are (`kernels.releases`), one verdict (`session`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from ..capture.case import Case
from ..capture.casefile import read_case
from ..capture.errors import BadInput, CannotRun, GdncheckError
from ..kernels import cache
from ..kernels.pool import WorkerPool
from ..kernels.releases import Release, between
from .cut import first_tokens
from .diff import check_arguments, verdict_device
from .relations.plan import Choice
from .session import Settings, diff_one
from .soundness import soundness_of
from .threads import threads_for
from .verdict import FAILING, VerdictWord
from .witness import Witness

Side = Literal["good", "bad"]
# Verdicts that say nothing about the numbers, unless an end has the same one.
NO_ANSWER: frozenset[VerdictWord] = frozenset({"skipped", "error", "timeout"})


class Tested(msgspec.Struct, frozen=True, kw_only=True):
    """One release and what came of it."""

    kernel: str
    verdict: VerdictWord | None
    """None: it could not be run."""
    rule: str | None = None
    reason: str = ""
    seconds: float = 0.0
    title: str = ""
    """A commit's first line."""


class Bisection(msgspec.Struct, frozen=True, kw_only=True):
    """What a bisection found."""

    kernel: str
    case: str
    good: Tested
    bad: Tested
    first_changed: Tested
    """The first release, in release order, that is on the newer end's side."""
    last_before: Tested
    """The last release known to be on the older end's side."""
    could_be: tuple[str, ...] = ()
    """Where releases between the two could not be run: every one that may be the first."""
    releases: int = 0
    """How many there are from one end to the other."""
    tried: tuple[Tested, ...] = ()
    """In the order in which they were judged, the ends first."""
    seconds: float = 0.0
    command: str = ""

    @property
    def skipped(self) -> tuple[Tested, ...]:
        """Those that gave no answer."""
        return tuple(t for t in self.tried if side_of(t, self.good, self.bad) is None)


def bisect(
    kernel: str,
    case: Case | Path | str,
    *,
    good: str,
    bad: str,
    offline: bool = False,
    sources: Mapping[str, str] | None = None,
    cache_dir: Path | str | None = None,
    device: str = "auto",
    time_limit: float = 300.0,
    seed: int = 0,
    relations: Choice = "auto",
    first: int | None = None,
    progress: Callable[[str], None] | None = None,
    command: str = "",
) -> Bisection:
    """Find the first release of `kernel` (family.op) between two that changes the verdict on a case.

    good, bad: versions, or `git:REV` of the clone in sources[family]; either may be the older one.
    offline: take what is in the cache; else missing versions are fetched. first: judge the first so many
    tokens of the first sequence. Raises BadInput where the ends give the same verdict or are the wrong way
    round, CannotRun where an end cannot be run.
    """
    started = time.monotonic()
    check_arguments(relations=relations, first=first)
    case = case if isinstance(case, Case) else read_case(case)
    if first is not None:
        case = first_tokens(case, first)
    say = progress or (lambda text: None)
    releases = between(kernel, good, bad, offline=offline, cache_dir=cache_dir, sources=sources)
    trial = _Trial(kernel, case, offline, sources, cache_dir, device, time_limit, seed, relations, say)
    older, newer = trial(releases[0]), trial(releases[-1])
    good_is_older = _is_end(releases[0], good, kernel, sources)
    one, other = (older, newer) if good_is_older else (newer, older)
    _check_ends(one, other)

    def side(index: int) -> Side | None:
        return side_of(trial(releases[index]), one, other)

    low, high = halve(len(releases), side)
    between_them = releases[low + 1 : high]
    names = [f"{kernel}@{r.where}" for r in (*between_them, releases[high])]
    return Bisection(
        kernel=kernel,
        case=str(case.path) if case.path is not None else case.label,
        good=one,
        bad=other,
        first_changed=trial(releases[high]),
        last_before=trial(releases[low]),
        could_be=tuple(names) if between_them else (),
        releases=len(releases),
        tried=tuple(trial.known.values()),
        seconds=time.monotonic() - started,
        command=command,
    )


def halve(n: int, side: Callable[[int], Side | None]) -> tuple[int, int]:
    """(last index on index 0's side, first on index n - 1's), with nothing but skipped ones between.

    side: of an index; None where it cannot be told, which is asked for once. The two ends differ.
    """
    low, high, first = 0, n - 1, side(0)
    skipped: set[int] = set()
    while True:
        left = [i for i in range(low + 1, high) if i not in skipped]
        if not left:
            return low, high
        middle = min(left, key=lambda i: abs(2 * i - low - high))
        found = side(middle)
        if found is None:
            skipped.add(middle)
        elif found == first:
            low = middle
        else:
            high = middle


def side_of(tested: Tested, good: Tested, bad: Tested) -> Side | None:
    """Which end a release belongs to; None where it gave no answer."""
    if tested.verdict == good.verdict:
        return "good"
    if tested.verdict == bad.verdict:
        return "bad"
    return None if tested.verdict is None or tested.verdict in NO_ANSWER else "bad"


def _check_ends(good: Tested, bad: Tested) -> None:
    """Raise where there is nothing to search for."""
    for end, word in ((good, "--good"), (bad, "--bad")):
        if end.verdict is None:
            raise CannotRun(f"{word} {end.kernel} cannot be run: {end.reason}")
    if good.verdict == bad.verdict:
        raise BadInput(
            f"{good.kernel} and {bad.kernel} give the same verdict on this case, {good.verdict}; nothing "
            "changes between them: give other ends or another case"
        )
    if good.verdict in FAILING and bad.verdict not in FAILING:
        raise BadInput(
            f"--good {good.kernel} gives {good.verdict} and --bad {bad.kernel} gives {bad.verdict}: "
            "they are the wrong way round"
        )


def _is_end(release: Release, end: str, kernel: str, sources: Mapping[str, str] | None) -> bool:
    """Whether a release is what the caller named so."""
    if not end.startswith("git:"):
        return release.where == end
    from ..kernels import checkout

    family = kernel.partition(".")[0]
    clone = checkout.clone_of(family, end.removeprefix("git:"), sources or {})
    return release.where == f"git:{checkout.commit_of(clone, end.removeprefix('git:'))}"


class _Trial:
    """Judges releases on one case, each once; the truth is shared."""

    def __init__(
        self,
        kernel: str,
        case: Case,
        offline: bool,
        sources: Mapping[str, str] | None,
        cache_dir: Path | str | None,
        device: str,
        time_limit: float,
        seed: int,
        relations: Choice,
        say: Callable[[str], None],
    ) -> None:
        self.kernel, self.offline, self.say = kernel, offline, say
        self.sources, self.cache_dir, self.device, self.time_limit = sources, cache_dir, device, time_limit
        self.settings = Settings(seed=seed, relations=relations)
        self.witness = Witness(case, device=verdict_device(device), seed=seed)
        self.soundness = soundness_of(self.witness)
        self.known: dict[str, Tested] = {}

    def __call__(self, release: Release) -> Tested:
        if release.where not in self.known:
            started = time.monotonic()
            name = f"{self.kernel}@{release.where}"
            self.say(name)
            found = self._judged(name, release)
            seconds = time.monotonic() - started
            self.known[release.where] = msgspec.structs.replace(found, seconds=seconds, title=release.title)
        return self.known[release.where]

    def _judged(self, name: str, release: Release) -> Tested:
        """Its verdict; a release that cannot be had or loaded says why. BadInput there is no mistake of the
        caller's: the layout of a release may be unknown."""
        try:
            self._get(release)
            with (
                WorkerPool(
                    device=self.device,
                    time_limit=self.time_limit,
                    cache_dir=self.cache_dir,
                    sources=self.sources,
                ) as pool,
                threads_for(self.witness.inputs.v.numel()),
            ):
                handle = pool.open(name)
                result = diff_one(handle, self.witness, self.soundness, self.settings)
        except GdncheckError as error:
            return Tested(kernel=name, verdict=None, reason=str(error))
        ruling = result.ruling
        return Tested(kernel=name, verdict=ruling.verdict, rule=ruling.rule, reason=ruling.reason)

    def _get(self, release: Release) -> None:
        """Put a version into the cache where it is neither there nor installed."""
        if release.where.startswith("git:") or self.offline:
            return
        from ..kernels import registry

        family, version = self.kernel.partition(".")[0], release.where
        adapter = registry.adapter_class(registry.parse_name(self.kernel))
        installed = registry.installed_version(getattr(adapter, "package", None))
        here = version == installed or cache.find(family, version, self.cache_dir) is not None
        if not here and cache.can_fetch(family):
            self.say(f"fetching {family}@{version}")
            cache.fetch(f"{family}@{version}", cache_dir=self.cache_dir)


def lines_of(found: Bisection) -> Sequence[str]:
    """What a person reads."""
    lines = [_line(tested, found) for tested in found.tried]
    before, changed = found.last_before, found.first_changed
    title = f" ({changed.title})" if changed.title else ""
    if found.could_be:
        lines.append(
            f"first that changes the verdict: one of {', '.join(found.could_be)}; "
            "those between could not be run"
        )
    else:
        lines.append(f"first that changes the verdict: {changed.kernel}{title}")
    lines.append(f"  {before.kernel}: {before.verdict}: {before.reason}")
    lines.append(f"  {changed.kernel}: {changed.verdict}: {changed.reason}")
    word = "release" if found.releases == 1 else "releases"
    lines.append(
        f"{before.verdict} becomes {changed.verdict}; {len(found.tried)} of {found.releases} {word} judged "
        f"in {found.seconds:.1f} s; {found.command}"
    )
    return lines


def _line(tested: Tested, found: Bisection) -> str:
    if side_of(tested, found.good, found.bad) is None:
        return f"{tested.kernel}: skipped: {tested.verdict or 'cannot run'}: {tested.reason}"
    return f"{tested.kernel}: {tested.verdict} ({tested.seconds:.1f} s)"
