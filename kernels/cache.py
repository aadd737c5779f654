"""The version cache: kernels of released versions side by side, taken from wheels through pip.

The idea: a kernel package is a few hundred kilobytes of Python, so any number of versions can lie in
directories of their own, one of which a worker puts first on its sys.path. Only what `keep` lists leaves
the wheel, each name checked, into a temporary directory that is then renamed: a directory that exists is
complete. A JSON file beside it says which wheel it came from.

Leaves to others: what is kept and which content is known (`keep`), running it (`registry`, `worker`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from ..capture.errors import BadInput, CannotRun
from .keep import KEEP, Kept, check_pin, kept_hash

CACHE_VARIABLE = "GDNCHECK_CACHE"
FETCH_LIMIT = 1800  # seconds for pip; vllm's wheels are large
MAX_UNPACKED = 512 << 20  # bytes that may leave one wheel


class CachedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version in the cache; the JSON file beside its directory holds this."""

    family: str
    version: str
    distribution: str
    sha256: str
    """Of the wheel that it was taken from."""
    content: str
    """`keep.kept_hash` of what was kept."""
    wheel: str
    """File name of that wheel."""
    n_files: int
    bytes: int
    """Size of what was kept."""
    pinned: bool = False
    """Was the wheel's hash one of those that we tested."""


def cache_root(cache_dir: Path | str | None = None) -> Path:
    """The cache directory: the argument, else $GDNCHECK_CACHE, else ~/.cache/gdncheck."""
    if cache_dir is not None:
        return Path(cache_dir)
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gdncheck"


def version_key(version: str) -> tuple[Any, ...]:
    """Order of versions: numbers by value, `dev`, `a`, `b`, `rc` before their release, `post` after it."""
    match = re.match(r"v?(\d+(?:\.\d+)*)[-_.]?([a-z]*)[-_.]?(\d*)", version.partition("+")[0].lower())
    if match is None:
        return ((), 0, "", 0)
    release = [int(part) for part in match[1].split(".")]
    while release and release[-1] == 0:
        release.pop()
    stage = {"": 1, "post": 2}.get(match[2], 0)
    # "a" < "b" < "rc" as text; dev comes before them all.
    return (tuple(release), stage, "" if match[2] == "dev" else match[2], int(match[3] or 0))


def find(family: str, version: str | None, cache_dir: Path | str | None = None) -> Path | None:
    """Directory of a cached version, or None."""
    if version is None:
        return None
    directory = _directory(cache_root(cache_dir), family, version)
    return directory if directory.is_dir() and _record(directory).is_file() else None


def fetch(
    name: str, *, cache_dir: Path | str | None = None, from_wheel: Path | str | None = None
) -> CachedVersion:
    """Put `fla@0.6.0` into the cache and return its record; nothing is done where it is there already.

    from_wheel: a wheel on disk instead of one from the package index.
    Raises BadInput for a name, a version or a wheel that is not one we can use, CannotRun where the
    package index cannot be reached.
    """
    family, _, version = name.partition("@")
    if not can_fetch(family):
        families = ", ".join(sorted({kept.family for kept in KEEP}))
        raise BadInput(f"{name}: versions can be fetched of {families}; give for example fla@0.6.0")
    if not re.fullmatch(r"[0-9][A-Za-z0-9.!_-]*(\+[A-Za-z0-9.]+)?", version):
        raise BadInput(f"{name}: give the version to fetch, for example {family}@0.6.0")
    kept = _kept(family, version)
    root = cache_root(cache_dir)
    directory = find(family, version, root)
    if directory is not None and from_wheel is None:
        return msgspec.json.decode(_record(directory).read_bytes(), type=CachedVersion)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".fetch-") as scratch:
            wheel = Path(from_wheel) if from_wheel is not None else _download(kept, version, Path(scratch))
            return _store(kept, version, wheel, Path(scratch), root)
    except OSError as error:
        raise CannotRun(f"cannot write the cache {root} ({error.strerror}); set {CACHE_VARIABLE}") from error


def can_fetch(family: str) -> bool:
    """Is it known what to keep of this family's wheels."""
    return any(kept.family == family for kept in KEEP)


def cached(cache_dir: Path | str | None = None) -> list[CachedVersion]:
    """What the cache holds, by family and version."""
    records = []
    for path in cache_root(cache_dir).glob("kernels/*/*.json"):
        if path.with_suffix("").is_dir():
            records.append(msgspec.json.decode(path.read_bytes(), type=CachedVersion))
    return sorted(records, key=lambda record: (record.family, version_key(record.version)))


def prune(names: list[str] | None = None, *, cache_dir: Path | str | None = None) -> list[CachedVersion]:
    """Remove versions (`fla@0.6.0`, or `fla` for all of them; None: everything). Returns what was removed.

    Raises BadInput for a name that the cache does not hold.
    """
    root, removed = cache_root(cache_dir), []
    everything = cached(root)
    for name in names or []:
        if not any(name in (record.family, f"{record.family}@{record.version}") for record in everything):
            raise BadInput(f"{name} is not in the cache {root}; see: gdncheck kernels list")
    for record in everything:
        if names is None or record.family in names or f"{record.family}@{record.version}" in names:
            directory = _directory(root, record.family, record.version)
            _record(directory).unlink()
            shutil.rmtree(directory)
            removed.append(record)
    return removed


def _directory(root: Path, family: str, version: str) -> Path:
    return root / "kernels" / family / version


def _record(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.json")


def _kept(family: str, version: str) -> Kept:
    """The table's line for a version. Raises BadInput where its layout is not known."""
    lines = [kept for kept in KEEP if kept.family == family]
    for kept in lines:
        until = kept.until is None or version_key(version) < version_key(kept.until)
        if version_key(kept.since) <= version_key(version) and until:
            return kept
    ranges = ", ".join(f"{kept.since} to {kept.until or 'newest'}" for kept in lines)
    raise BadInput(f"{family}@{version}: the layout of that version is unknown; known are {ranges}")


def _download(kept: Kept, version: str, scratch: Path) -> Path:
    """Let pip put the wheel into `scratch`; the wheel's path."""
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
        "--disable-pip-version-check", "--dest", str(scratch), f"{kept.distribution}=={version}",
    ]  # fmt: skip
    try:
        pip = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        raise CannotRun(f"pip gave no {kept.distribution} {version} within {FETCH_LIMIT} s") from None
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode == 0 and wheels:
        return wheels[0]
    raise _pip_failure(kept, version, pip.stderr)


def _pip_failure(kept: Kept, version: str, said: str) -> BadInput | CannotRun:
    """What pip's failure means, in one line."""
    name = f"{kept.distribution} {version}"
    if "No module named pip" in said:
        return CannotRun(f"pip is not installed for {sys.executable}; use --from-wheel FILE")
    offered = re.search(r"from versions: ([^)]*)\)", said)
    if offered and offered[1] not in ("", "none"):
        return BadInput(f"the package index has no {name}; it has {offered[1]}")
    lines = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR")]
    what = f" ({' '.join(lines[-1].split())})" if lines else ""
    return CannotRun(f"pip could not get {name}{what}; without a network, use --from-wheel FILE")


def _store(kept: Kept, version: str, wheel: Path, scratch: Path, root: Path) -> CachedVersion:
    """Unpack what is kept and move it into place."""
    if not wheel.is_file():
        raise BadInput(f"{wheel}: there is no such file")
    with wheel.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    unpacked = scratch / "unpacked"
    unpacked.mkdir()
    names = _unpack(kept, version, wheel, unpacked)
    content = kept_hash((name, (unpacked / name).read_bytes()) for name in names)
    record = CachedVersion(
        family=kept.family,
        version=version,
        distribution=kept.distribution,
        sha256=sha256,
        content=content,
        wheel=wheel.name,
        n_files=len(names),
        bytes=sum((unpacked / name).stat().st_size for name in names),
        pinned=check_pin(kept.distribution, version, wheel.name, sha256, content),
    )
    directory = _directory(root, kept.family, version)
    directory.parent.mkdir(parents=True, exist_ok=True)
    if directory.exists():
        os.replace(directory, scratch / "replaced")
    os.replace(unpacked, directory)
    beside = scratch / "record.json"
    beside.write_text(json.dumps(msgspec.to_builtins(record), indent=2) + "\n")
    os.replace(beside, _record(directory))
    return record


def _unpack(kept: Kept, version: str, wheel: Path, target: Path) -> list[str]:
    """Write the kept files of a wheel below `target`; their names."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            _check_version(kept, version, wheel, archive)
            members = [m for m in archive.infolist() if not m.is_dir() and kept.holds(m.filename)]
            _check_members(kept, version, wheel, members)
            for member in members:
                path = target / member.filename
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(member))
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise BadInput(f"{wheel.name} is no wheel that can be read ({error}); download it again") from error
    return [member.filename for member in members]


def _check_version(kept: Kept, version: str, wheel: Path, archive: zipfile.ZipFile) -> None:
    """The wheel must be what it is taken for. Raises BadInput."""
    names = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
    if len(names) != 1:
        raise BadInput(f"{wheel.name} has {len(names)} METADATA files, so it is no wheel; give a .whl file")
    head = archive.read(names[0]).decode(errors="replace").partition("\n\n")[0]
    fields = dict(re.findall(r"^(Name|Version): *(.+?)\s*$", head, re.MULTILINE))
    found_name = re.sub(r"[-_.]+", "-", fields.get("Name", "")).lower()
    found_version = fields.get("Version", "")
    if (found_name, version_key(found_version)) != (kept.distribution, version_key(version)):
        raise BadInput(f"{wheel.name} is {found_name} {found_version}, not {kept.distribution} {version}")


def _check_members(kept: Kept, version: str, wheel: Path, members: list[zipfile.ZipInfo]) -> None:
    """Refuse names that would leave the directory, links, and archives that unfold to too much."""
    for member in members:
        path = PurePosixPath(member.filename)
        if path.is_absolute() or ".." in path.parts or "\\" in member.filename or ":" in path.parts[0]:
            raise BadInput(f"{wheel.name}: the name {member.filename!r} leads out of the archive; refused")
        mode = member.external_attr >> 16
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            raise BadInput(f"{wheel.name}: {member.filename} is not an ordinary file; refused")
    if kept.needs not in {member.filename for member in members}:
        raise BadInput(
            f"{kept.distribution} {version}: the layout of that version is unknown; looked for {kept.needs}"
        )
    if sum(member.file_size for member in members) > MAX_UNPACKED:
        raise BadInput(f"{wheel.name} would unfold to more than {MAX_UNPACKED >> 20} MB; refused")
