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
from collections.abc import Mapping
from pathlib import Path

from ..capture.errors import BadInput, CannotRun
from .cache import cache_root


def checked_out(
    family: str, revision: str, sources: Mapping[str, str], cache_dir: Path | str | None = None
) -> Path:
    """The files of a revision, unpacked once.

    sources: family -> clone. Raises BadInput where no clone is given or it has no such revision.
    """
    if family not in sources:
        raise BadInput(f"{family}@git:{revision} needs a clone; give --source {family}=DIR")
    clone = Path(sources[family]).expanduser()
    if not clone.is_dir():
        raise BadInput(f"--source {family}={sources[family]}: there is no such directory")
    commit = _git(clone, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if commit is None:
        raise BadInput(f"{clone} has no revision {revision}; fetch it there, or give another")
    name = commit.decode().strip()
    directory = cache_root(cache_dir) / "git" / family / name
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".checkout-") as scratch:
        archive = Path(scratch) / "files.tar"
        if _git(clone, "archive", "--format=tar", f"--output={archive.resolve()}", name) is None:
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


def _git(clone: Path, *arguments: str) -> bytes | None:
    """What git prints, or None where it fails. Raises CannotRun without git."""
    try:
        done = subprocess.run(["git", "-C", str(clone), *arguments], capture_output=True, check=False)
    except FileNotFoundError:
        raise CannotRun("git is not installed; give a directory with @path:DIR instead") from None
    return done.stdout if done.returncode == 0 else None
