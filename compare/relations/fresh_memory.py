"""Fresh memory: what nobody has written may hold anything, and nothing is written outside a buffer.

Statement. With every fresh allocation filled with NaN, and inputs and allocations between guard bands, the
case gives the same bits, and no band changes.
Exercised by the bytes that were filled before the kernel saw them.
Fires on: a row that is read before it is written, a read past an input's end, a write outside.
Silent on: kernels whose allocations Python cannot see (then nothing was filled: not applicable).
"""

from __future__ import annotations

import torch

from ...kernels.interface import RunResult
from ..inputs import Inputs
from ..trial import Trial
from ..verdict import Outcome, Place
from .expectation import Expectation, Plan, same_rows

NAME, TIER = "fresh-memory", 4


def plan(inputs: Inputs, *, seed: int) -> Plan:
    """The case with fresh memory poisoned and guarded."""
    del seed
    return [
        Expectation(
            relation=NAME,
            inputs=inputs,
            what="fresh memory full of NaN",
            verb="and guard bands around it",
            options={"poison": "nan", "guard": True},
            output_rows=same_rows(torch.arange(inputs.n_tokens, device=inputs.device)),
            state_rows=same_rows(torch.arange(inputs.n_sequences, device=inputs.device)),
            proof="poisoned_bytes",
            judge=_bands,
        )
    ]


def _bands(trial: Trial, result: RunResult) -> Outcome | None:
    """A changed guard band decides by itself; None leaves the results to be compared."""
    del trial
    written = result.evidence.get("guard_written") or []
    if not written:
        return None
    first = written[0]
    reason = (
        f"{NAME}: the kernel wrote {first['bytes']} bytes {first['side']} {first['buffer']}, outside its own"
        f" ({len(written)} guard bands changed)"
    )
    return Outcome(
        check=NAME, tier=TIER, status="fires", reason=reason, place=Place(tensor="output", class_="wrong"),
        numbers={"bands": len(written), "would_pass": {}},
    )  # fmt: skip
