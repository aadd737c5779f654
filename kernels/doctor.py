"""What can run on this machine and why not: the facts, each kernel tried, the combinations known to go wrong.

The idea: nothing is guessed. A child says what is installed (`probe`), every kernel that is here is
loaded in its worker (`inventory.try_out`), and a table says which combinations of the two are known
(`combinations`).

Leaves to others: printing (the command line).
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from ..capture.errors import CannotRun
from .combinations import Combination, applying
from .inventory import KernelStatus, inventory, try_out
from .process import child_command, child_environment

PROBE_LIMIT = 120  # seconds; a first `import triton` on a cold disk takes many


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the doctor found; `--json` prints it."""

    schema: int = 1
    facts: dict[str, Any]
    """As `probe` tells them: python, packages, gpus, driver, ptxas, interpreter, errors."""
    kernels: list[KernelStatus]
    combinations: list[Combination]
    """The known combinations that apply here."""

    @property
    def runnable(self) -> list[KernelStatus]:
        return [kernel for kernel in self.kernels if kernel.runs_on is not None]

    @property
    def exit_status(self) -> int:
        """0, or 3 where no kernel can run."""
        return 0 if self.runnable else 3


def doctor(*, device: str = "auto", cache_dir: Path | str | None = None) -> Report:
    """Examine this machine; takes seconds, as it loads every installed kernel once.

    Raises CannotRun where not even the examination runs (no torch, say).
    """
    facts = probe()
    kernels = [kernel for kernel in inventory(cache_dir) if kernel.found != "cached"]
    kernels = try_out(kernels, device=device, cache_dir=cache_dir)
    versions = facts["packages"] or {}
    combinations = applying(facts, versions)
    return Report(facts=facts, kernels=_stopped(kernels, combinations), combinations=combinations)


def probe() -> dict[str, Any]:
    """The facts about this machine, from a child. Raises CannotRun where the child gives none."""
    try:
        child = subprocess.run(
            child_command("gdncheck.kernels.probe"),
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CannotRun(
            f"importing torch and triton takes more than {PROBE_LIMIT} s here; try again"
        ) from None
    try:
        facts: dict[str, Any] = json.loads(child.stdout.strip().rpartition("\n")[2])
    except ValueError:
        said = [line for line in child.stderr.splitlines() if line.strip()]
        why = f": {' '.join(said[-1].split())}" if said else ""
        raise CannotRun(f"the examination ended with status {child.returncode}{why}") from None
    return facts


def _stopped(kernels: list[KernelStatus], combinations: list[Combination]) -> list[KernelStatus]:
    """Kernels that load but that a known combination stops at their first call."""
    families = {family: c for c in combinations if c.level == "stops" for family in c.stops}
    marked = []
    for kernel in kernels:
        reason = families.get(kernel.name.partition(".")[0])
        if reason is not None and kernel.runs_on is not None:
            kernel = msgspec.structs.replace(kernel, runs_on=None, why_not=f"{reason.text} ({reason.source})")
        marked.append(kernel)
    return marked
