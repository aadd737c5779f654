"""Inputs kept: a kernel writes its results and nothing that it was given.

Statement. After a call every input holds the bytes that it was handed over with, but for a pool of slots,
which a kernel may update in place (`slots` judges that). The caller reads q, k, v and gates again: in the
next layer's residual, in a retry, in the next split.
Fires on: the first input that the worker found changed.
Silent on: a tensor that a clause `writes.NAME` declares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...kernels.contract import Contract
from ..verdict import Outcome

NAME, TIER = "inputs-kept", 4
OWN = frozenset({"pool"})


def check(evidence: Mapping[str, Any], contract: Contract, *, given: int) -> Outcome:
    """evidence: a call's, where the worker lists changed inputs under `inputs_written`; given: inputs."""
    written = [n for n in evidence.get("inputs_written", ()) if n not in OWN]
    undeclared = [n for n in written if contract.find(f"writes.{n}") is None]
    if not undeclared:
        return Outcome(check=NAME, tier=TIER, status="ok", numbers={"exercised": given, "declared": written})
    names = ", ".join(undeclared)
    return Outcome(
        check=NAME,
        tier=TIER,
        status="fires",
        reason=f"the kernel wrote into its input {names}: the tensor no longer holds what was handed over",
        numbers={"inputs_written": undeclared},
    )
