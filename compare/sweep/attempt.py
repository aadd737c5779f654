"""An attempt: what became of one configuration, as plain data that the store, the report and JSON share."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ..verdict import FAILING, Place, VerdictWord

Kind = Literal["nonfinite", "wrong", "error"]


class Margins(msgspec.Struct, frozen=True, kw_only=True):
    """How far a passing result was from failing; None where it was not measured."""

    state_share: float | None = None
    """Largest |state| over the largest finite number of its dtype."""
    error_over_bound: float | None = None
    """Largest error over the running bound (tier 2), where that is informative."""
    ratio: float | None = None
    """Largest RMS ratio of a tile to the emulation's (tier 3; the limit is 1.5)."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel, one case, one configuration."""

    kernel: str
    case: str
    config: dict[str, str]
    """Every axis and its value."""
    deviations: dict[str, str]
    """The axes that depart from the baseline."""
    verdict: VerdictWord
    tier: int | None = None
    rule: str | None = None
    reason: str = ""
    place: Place | None = None
    """Of the first non-finite value, else of the worst tile; sequences count in the call as it was made."""
    nonfinite: bool = False
    """The first fault is a NaN or an infinity that the truth has not."""
    own_sequences: tuple[int, ...] = ()
    """Where the case's own sequences stand in the call, in the case's order."""
    contract_differences: tuple[str, ...] = ()
    """Declared departures without which it would not agree with the truth, in words."""
    error: dict[str, float | None] = {}
    margins: Margins = Margins()
    exercised: dict[str, str] = {}
    """Axis -> proof that the run had the change."""
    seconds: float = 0.0
    """Of the kernel alone."""
    fresh: bool = False
    """Run in a process of its own, to confirm."""
    evidence: dict[str, Any] = {}

    @property
    def failed(self) -> bool:
        return self.verdict in FAILING

    @property
    def uncompiled(self) -> str:
        """What the compiler, or the device, said of a pin that it refused; empty where it was launched."""
        failures: dict[str, str] = self.evidence.get("compile_failures", {})
        return "; ".join(failures.values()) if self.verdict == "skipped" else ""

    @property
    def kind(self) -> Kind | None:
        """What kind of failure this is; None where it did not fail, or where the input is to blame."""
        if self.verdict == "fail":
            return "nonfinite" if self.nonfinite else "wrong"
        return "error" if self.verdict in ("error", "timeout") else None
