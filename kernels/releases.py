"""Which versions of a kernel there are between two, in release order: the cache's, the index's, a clone's.

The idea: one list that runs from the older end to the newer one, whatever the ends are called, so that a
search over it does not care whether it walks releases or commits.

Leaves to others: fetching one (`cache`), a revision's files (`checkout`), judging them (compare).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..capture.errors import BadInput, CannotRun
from . import cache, checkout, registry
from .keep import KEEP

INDEX_LIMIT = 120  # seconds for the package index to list the versions of one package
PRERELEASE = re.compile(r"\d(a|b|rc|\.?dev)\d")


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """One point of the walk."""

    where: str
    """What stands behind the @ of a kernel's name: `0.5.2`, or `git:` and a commit's hash."""
    title: str = ""
    """A commit's first line."""


def between(
    kernel: str,
    one: str,
    other: str,
    *,
    offline: bool = False,
    cache_dir: Path | str | None = None,
    sources: Mapping[str, str] | None = None,
) -> list[Release]:
    """The releases from the older of two ends to the newer one, both included.

    kernel: `family.op`. one, other: both versions, or both `git:REV` of the clone in sources[family].
    offline: only what is in the cache or installed. Raises BadInput for ends that are no such pair.
    """
    name = registry.parse_name(kernel)
    if name.family is None or str(name) != f"{name.family}.{name.op}":
        raise BadInput(f"{kernel}: give family.op alone, for example fla.chunk; the ends say which versions")
    adapter = registry.adapter_class(name)
    ends = [registry.parse_name(f"{kernel}@{end}") for end in (one, other)]
    if any(end.path is not None for end in ends):
        raise BadInput(f"between {one} and {other}: a directory has no releases; give versions or git:REV")
    if all(end.revision is not None for end in ends):
        assert name.family is not None
        return _commits(name.family, [str(end.revision) for end in ends], sources or {})
    if any(end.revision is not None for end in ends):
        raise BadInput(f"between {one} and {other}: give two versions, or two revisions as git:REV")
    known = {one, other, *_cached(name.family, cache_dir)}
    installed = registry.installed_version(getattr(adapter, "package", None))
    known |= {installed} if installed else set()
    known |= set() if offline else set(on_index(name.family))
    low, high = sorted((cache.version_key(one), cache.version_key(other)))
    inside = {v for v in known if low <= cache.version_key(v) <= high}
    wanted = {v for v in inside if v in (one, other) or not PRERELEASE.search(v)}
    return [Release(where=version) for version in sorted(wanted, key=cache.version_key)]


def _cached(family: str, cache_dir: Path | str | None) -> list[str]:
    return [record.version for record in cache.cached(cache_dir) if record.family == family]


def on_index(family: str) -> list[str]:
    """Versions of a family's package as pip lists them; none for a family that cannot be fetched.

    Raises CannotRun where pip gives no list.
    """
    distribution = next((kept.distribution for kept in KEEP if kept.family == family), None)
    if distribution is None:
        return []
    command = [
        sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", distribution,
    ]  # fmt: skip
    try:
        pip = subprocess.run(command, capture_output=True, text=True, timeout=INDEX_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        raise CannotRun(
            f"pip lists no versions of {distribution} within {INDEX_LIMIT} s; use --offline"
        ) from None
    listed = re.search(r"^Available versions: (.+)$", pip.stdout, re.MULTILINE)
    if listed is None:
        said = [line.removeprefix("ERROR: ") for line in pip.stderr.splitlines() if line.startswith("ERROR")]
        why = f" ({' '.join(said[-1].split())})" if said else ""
        raise CannotRun(f"pip lists no versions of {distribution}{why}; --offline takes those of the cache")
    return [version.strip() for version in listed[1].split(",")]


def _commits(family: str, ends: list[str], sources: Mapping[str, str]) -> list[Release]:
    """First-parent commits from one end to the other, the older one first."""
    clone = checkout.clone_of(family, ends[0], sources)
    one, other = (checkout.commit_of(clone, end) for end in ends)
    for old, new in ((one, other), (other, one)):
        if checkout.git(clone, "merge-base", "--is-ancestor", old, new) is not None:
            break
    else:
        raise BadInput(f"{clone}: neither of {ends[0]} and {ends[1]} is an ancestor of the other")
    listed = checkout.git(clone, "log", "--first-parent", "--reverse", "--format=%H %s", f"{old}..{new}")
    if listed is None:
        raise CannotRun(f"git could not list the commits of {clone} from {old[:12]} to {new[:12]}")
    head = checkout.git(clone, "log", "-1", "--format=%H %s", old) or b""
    lines = [*head.decode().splitlines(), *listed.decode().splitlines()]
    pairs = [line.partition(" ") for line in lines]
    return [Release(where=f"git:{commit}", title=title) for commit, _, title in pairs]
