"""A revision of somebody's clone as a directory of its own, for `@git:REV`.

The idea: `git archive` of the commit into the cache, keyed by the commit's hash. The clone is read and
never written: no worktree is registered in it and its files stay as they are.

Leaves to others: versions from wheels (`cache`), what a directory means to an adapter.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..capture.errors import BadInput, CannotRun
from .cache import cache_root

_in_use: dict[str, str] = {}
"""Family -> clone, of the command that runs in this process."""


def use_sources(sources: Mapping[str, str]) -> None:
    """Read revisions from these clones wherever a call names none of its own."""
    _in_use.clear()
    _in_use.update(sources)


def checked_out(
    family: str, revision: str, sources: Mapping[str, str], cache_dir: Path | str | None = None
) -> Path:
    """The files of a revision, unpacked once.

    sources: family -> clone. Raises BadInput where no clone is given or it has no such revision.
    """
    clone = clone_of(family, revision, sources)
    name = commit_of(clone, revision)
    directory = cache_root(cache_dir) / "git" / family / name
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".checkout-") as scratch:
        archive = Path(scratch) / "files.tar"
        if git(clone, "archive", "--format=tar", f"--output={archive.resolve()}", name) is None:
            raise CannotRun(f"git could not read commit {name[:12]} of {clone}")
        unpacked = Path(scratch) / "files"
        with tarfile.open(archive) as tar:
            tar.extractall(unpacked, filter="data")
        try:
            os.replace(unpacked, directory)
        except OSError:
            if not directory.is_dir():  # else another process was faster
                raise
    return directory


def clone_of(family: str, revision: str, sources: Mapping[str, str]) -> Path:
    """The clone that a family's revisions are read from. Raises BadInput where there is none."""
    given = sources.get(family, _in_use.get(family))
    if given is None:
        raise BadInput(f"{family}@git:{revision} needs a clone; give --source {family}=DIR")
    clone = Path(given).expanduser()
    if not clone.is_dir():
        raise BadInput(f"--source {family}={given}: there is no such directory")
    return clone


def commit_of(clone: Path, revision: str) -> str:
    """A revision's full hash. Raises BadInput where the clone has no such revision."""
    commit = git(clone, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if commit is None:
        raise BadInput(f"{clone} has no revision {revision}; fetch it there, or give another")
    return commit.decode().strip()


def sources_of(given: Iterable[str]) -> dict[str, str]:
    """`fla=DIR` words as family -> clone. Raises BadInput for another word, or a family given twice."""
    found: dict[str, str] = {}
    for word in given:
        family, equals, directory = word.partition("=")
        if not (family and equals and directory):
            raise BadInput(f"--source {word}: give FAMILY=DIR, for example fla=../flash-linear-attention")
        if family in found:
            raise BadInput(f"--source {word}: {family} has a clone already, {found[family]}")
        found[family] = directory
    return found


def git(clone: Path, *arguments: str) -> bytes | None:
    """What git prints, or None where it fails. Raises CannotRun without git."""
    try:
        done = subprocess.run(["git", "-C", str(clone), *arguments], capture_output=True, check=False)
    except FileNotFoundError:
        raise CannotRun("git is not installed; give a directory with @path:DIR instead") from None
    return done.stdout if done.returncode == 0 else None
