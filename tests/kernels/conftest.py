"""Engine kernels for the tests: fetched once, one worker per kernel and module."""

from __future__ import annotations

from pathlib import Path

import pytest
from gdncheck.capture.errors import CannotRun
from gdncheck.kernels import cache, registry
from gdncheck.kernels.pool import KernelHandle
from gdncheck.kernels.protocol import KernelSpec

ENGINES = Path(__file__).parent / "engines"


def spec_of(name: str) -> KernelSpec:
    """What a worker loads for a kernel; its version is fetched where that is not here.

    Skips the test where the package index cannot be reached.
    """
    try:
        return registry.resolve(name)
    except CannotRun:
        family, _, version = name.partition("@")
        try:
            cache.fetch(f"{family.partition('.')[0]}@{version}")
        except CannotRun as error:
            pytest.skip(f"{name} cannot be had: {error}")
        return registry.resolve(name)


@pytest.fixture(scope="module")
def engine():
    """engine(name) opens a kernel in a worker that the module's tests share.

    `wrong=True` opens the same kernel under an adapter that can make a mistake (engines/wrong_adapters.py).
    """
    handles: dict[str, KernelHandle] = {}

    def opened(name: str, wrong: bool = False, device: str = "cpu") -> KernelHandle:
        key = f"{name} wrong={wrong} on {device}"
        if key not in handles:
            spec = spec_of(name)
            if wrong:
                spec = KernelSpec(
                    name=f"wrong.{name}",
                    module="wrong_adapters",
                    attribute=f"{spec.module.rpartition('.')[2]}.{spec.attribute}",
                    version=spec.version,
                    python=spec.python,
                    sys_path=(*spec.sys_path, str(ENGINES)),
                )
            handles[key] = KernelHandle(spec, device=device, time_limit=300)
        return handles[key]

    yield opened
    for handle in handles.values():
        handle.close()
