"""What a fuzz run was asked for: plain data, so that runners in other processes get it as JSON, and a resumed
run can be told from another one.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    kernels: tuple[str, ...]
    seed: int = 0
    device: str = "auto"
    captures: tuple[str, ...] = ()
    """Paths of case files to cut from."""
    shapes: tuple[str, ...] = ()
    """Words of shapes; empty: by kernel and device."""
    families: tuple[str, ...] = ()
    max_tokens: int | None = None
    axes: dict[str, tuple[str, ...]] = {}
    only: tuple[str, ...] = ()
    excepted: tuple[str, ...] = ()
    baseline: str | None = None
    tune: str = "never"
    """How Triton kernels choose: `never` (their first configuration that fits) or `stock`."""
    batch: int = 32
    """Cases of a kernel in flight at most."""
    time_limit: float = 120.0
    """Seconds for a process's first call, compile included; later ones get less."""
    cases: int | None = None
    """Numbers of all kernels together."""
    shard: tuple[int, int] = (1, 1)
    confirm_seconds: float = 120.0
    shrink_seconds: float = 120.0

    def cases_of(self, kernel: int) -> int | None:
        """Numbers of one kernel."""
        if self.cases is None:
            return None
        each, more = divmod(self.cases, len(self.kernels))
        return each + (kernel < more)

    def identity(self, digests: list[str]) -> dict[str, Any]:
        """What the answers depend on. digests: of the captures, in order."""
        return {
            "what": "fuzz", "kernels": list(self.kernels), "seed": self.seed, "device": self.device,
            "captures": digests, "shapes": list(self.shapes), "families": list(self.families),
            "max_tokens": self.max_tokens, "axes": {n: list(v) for n, v in self.axes.items()},
            "only": list(self.only), "except": list(self.excepted), "baseline": self.baseline,
            "tune": self.tune, "shard": list(self.shard),
        }  # fmt: skip
