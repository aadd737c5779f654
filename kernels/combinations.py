"""Combinations of versions and hardware that are known to go wrong, as one table.

The idea: each line says when it applies (version ranges, where kernels run, the GPU's architecture, how
ptxas stands to the driver), what happens, what to do, and where that is known from. `doctor` walks it.

Leaves to others: finding out what is installed (`probe`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from .cache import version_key

Level = Literal["stops", "warns", "notes", "handled"]


class Combination(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table."""

    id: str
    level: Level
    """`stops`: those kernels cannot run; `warns`: results need care; `notes`: worth
    telling in a report; `handled`: gdncheck works around it."""
    text: str
    """What happens, and what to do about it."""
    source: str
    packages: dict[str, tuple[str | None, str | None]] = {}
    """Distribution -> versions [since, until) that it needs, all of them."""
    where: Literal["interpreter", "cuda"] | None = None
    """Where kernels run; None: anywhere."""
    capability: tuple[str, str | None] | None = None
    """Compute capabilities [since, until)."""
    ptxas: Literal["older than driver", "newer than driver"] | None = None
    ptxas_until: str | None = None
    """Applies to assemblers before this release."""
    stops: tuple[str, ...] = ()
    """Families that cannot run, for `stops`."""


COMBINATIONS = (
    Combination(
        id="fla-block-pointers", level="stops", stops=("fla",),
        packages={"fla-core": (None, "0.5"), "triton": ("3.9", None)},
        text="fla-core 0.4 uses block pointers; Triton 3.9 has none: install fla-core 0.6 or triton < 3.9",
        source="kernels of fla-core 0.4.0 against the release notes of Triton 3.9",
    ),
    Combination(
        id="numpy-scalars", level="handled", where="interpreter",
        packages={"numpy": ("2.4", None), "triton": (None, "3.9")},
        text="numpy 2.4 makes no int of an array, which Triton's interpreter before 3.9 asks for; "
        "workers put that right",
        source="numpy 2.4 release notes (expired deprecation)",
    ),
    Combination(
        id="interpreter-bfloat16", level="handled", where="interpreter", packages={"triton": (None, None)},
        text="Triton's own interpreter multiplies bfloat16 as integers and truncates casts; "
        "workers compute in float32 and round to nearest even",
        source="triton.runtime.interpreter",
    ),
    Combination(
        id="hopper-backward", level="warns", where="cuda", capability=("9.0", "10.0"),
        packages={"triton": ("3.4", "3.7.1"), "fla-core": (None, None)},
        text="Triton 3.4 to 3.7.0 miscompiles FLA's backward kernels on Hopper; forward verdicts stand, "
        "gradients need another Triton",
        source="flash-linear-attention issue 640",
    ),
    Combination(
        id="ptxas-older-than-driver", level="notes", where="cuda", ptxas="older than driver",
        text="the driver expects a newer ptxas than Triton's, so kernels are assembled by an older "
        "compiler than the driver would use; set TRITON_PTXAS_PATH to compare",
        source="CUDA compatibility guide",
    ),
    Combination(
        id="ptxas-newer-than-driver", level="warns", where="cuda", ptxas="newer than driver",
        text="Triton's ptxas is newer than the driver's CUDA; its code may not load: update the driver, or "
        "set TRITON_PTXAS_PATH",
        source="CUDA compatibility guide",
    ),
    Combination(
        id="ptxas-before-blackwell", level="stops", where="cuda",
        capability=("10.0", None), ptxas_until="12.8", stops=("fla", "vllm", "sglang"),
        text="this ptxas knows no Blackwell GPU; install triton >= 3.3, or set TRITON_PTXAS_PATH",
        source="CUDA 12.8 release notes",
    ),
    Combination(
        id="fla-flashqla", level="handled", packages={"fla-core": ("0.6", None), "flash-qla": (None, None)},
        text="fla-core 0.6 hands its chunk kernel over to FlashQLA where that is installed; "
        "workers set FLA_DISABLE_BACKEND_DISPATCH=1",
        source="fla/ops/backends of fla-core 0.6.0",
    ),
)  # fmt: skip


def applying(facts: Mapping[str, Any], versions: Mapping[str, str]) -> list[Combination]:
    """The lines that hold here.

    facts: what `probe` found. versions: distribution -> version that kernels will really use.
    """
    return [combination for combination in COMBINATIONS if _applies(combination, facts, versions)]


def _applies(combination: Combination, facts: Mapping[str, Any], versions: Mapping[str, str]) -> bool:
    gpus = facts.get("gpus") or {}
    where = "cuda" if gpus.get("available") else "interpreter"
    if combination.where not in (None, where):
        return False
    for package, (since, until) in combination.packages.items():
        if package not in versions or not _between(versions[package], since, until):
            return False
    if combination.capability is not None:
        capabilities = [device["capability"] for device in gpus.get("devices", [])]
        if not any(_between(found, *combination.capability) for found in capabilities):
            return False
    release = (facts.get("ptxas") or {}).get("version")
    if combination.ptxas is not None and combination.ptxas != _against_driver(
        release, gpus.get("driver_cuda")
    ):
        return False
    if combination.ptxas_until is None:
        return True
    return release is not None and _between(release, None, combination.ptxas_until)


def _against_driver(release: str | None, driver_cuda: str | None) -> str | None:
    """How Triton's ptxas stands to the driver: older by any release, newer only by a major one.

    Code of a newer minor release loads on a driver of the same major one.
    """
    if not release or not driver_cuda:
        return None
    assembler, driver = (tuple(int(n) for n in text.split(".")[:2]) for text in (release, driver_cuda))
    if assembler < driver:
        return "older than driver"
    return "newer than driver" if assembler[0] > driver[0] else None


def _between(version: str, since: str | None, until: str | None) -> bool:
    key = version_key(version)
    return (since is None or version_key(since) <= key) and (until is None or key < version_key(until))
