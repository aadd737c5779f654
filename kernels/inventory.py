"""Which kernels there are here: known, installed, cached, and why one cannot run.

The idea: everything that can be told without importing a kernel's package is told by `inventory`;
`try_out` then loads each in its worker, which is the only proof that it runs.

Leaves to others: names (`registry`), the cache (`cache`), known-bad combinations (`combinations`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..capture.errors import GdncheckError
from . import cache, registry
from .pool import KernelHandle, WorkerPool

LOAD_LIMIT = 180.0  # seconds for importing a kernel's package
AT_ONCE = 4  # workers; each needs about half a gigabyte while it loads


class KernelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel at one version."""

    name: str
    """Canonical name, as `--kernel` takes it."""
    package: str | None = None
    version: str | None = None
    found: str
    """`installed`, `cached`, `built in`, `other package` or `missing`."""
    devices: tuple[str, ...] = ()
    runs_on: str | None = None
    """`cuda`, `cpu`, `cpu (interpreted)` once it was tried; None: not tried, or it does not run."""
    why_not: str | None = None
    """One line about why it cannot run here."""


def inventory(cache_dir: Path | str | None = None) -> list[KernelStatus]:
    """Every known kernel: installed and cached versions, or that its package is missing. Imports none."""
    statuses = []
    in_cache = cache.cached(cache_dir)
    for key, adapter in sorted(registry.own_kernels().items()):
        package, devices = adapter.package, adapter.capabilities.devices
        family = key.partition(".")[0]
        installed = registry.installed_version(package)
        if package is None:
            statuses.append(KernelStatus(name=key, found="built in", devices=devices))
        elif installed is not None:
            name = f"{key}@{installed}"
            status = KernelStatus(
                name=name, package=package, version=installed, found="installed", devices=devices
            )
            statuses.append(status)
        cached = [r.version for r in in_cache if r.family == family and r.version != installed]
        for version in cached:
            status = KernelStatus(
                name=f"{key}@{version}", package=package, version=version, found="cached", devices=devices
            )
            statuses.append(status)
        if package is not None and installed is None and not cached:
            statuses.append(_missing(key, package, family, devices))
    for family in sorted(set(registry.family_modules()) - set(registry.OWN_FAMILIES)):
        statuses.append(KernelStatus(name=f"{family}.*", found="other package"))
    return statuses


def _missing(key: str, package: str, family: str, devices: tuple[str, ...]) -> KernelStatus:
    fetched = f", or run: gdncheck kernels fetch {family}@VERSION" if cache.can_fetch(family) else ""
    why = f"{package} is not installed; run: pip install {package}{fetched}"
    return KernelStatus(name=key, package=package, found="missing", devices=devices, why_not=why)


def try_out(
    statuses: Sequence[KernelStatus], *, device: str = "auto", cache_dir: Path | str | None = None
) -> list[KernelStatus]:
    """Load each kernel in a worker, a few at once, and say where it runs or why not."""
    tried = list(statuses)
    present = [i for i, status in enumerate(tried) if status.found in ("installed", "cached", "built in")]
    with WorkerPool(device=device, time_limit=LOAD_LIMIT, cache_dir=cache_dir) as pool:
        for start in range(0, len(present), AT_ONCE):
            begun = [(i, _begin(pool, tried[i].name)) for i in present[start : start + AT_ONCE]]
            for index, handle in begun:
                tried[index] = _tried(tried[index], handle)
    return tried


def _begin(pool: WorkerPool, name: str) -> KernelHandle | GdncheckError:
    try:
        return pool.begin(name)
    except GdncheckError as error:
        return error


def _tried(status: KernelStatus, handle: KernelHandle | GdncheckError) -> KernelStatus:
    if isinstance(handle, GdncheckError):
        return msgspec.structs.replace(status, why_not=str(handle))
    try:
        environment = handle.info.environment
    except GdncheckError as error:
        return msgspec.structs.replace(status, why_not=str(error))
    finally:
        handle.close()
    interpreted = " (interpreted)" if environment.get("interpreted") else ""
    return msgspec.structs.replace(status, runs_on=f"{environment['device']}{interpreted}")
