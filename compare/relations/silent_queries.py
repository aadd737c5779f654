"""Silent queries: a row whose query is zero is zero, whatever stands in every other row.

Statement. o_t = scale * S_t^T q_t and S_t is finite, so q_t = 0 gives o_t = 0 exactly: nothing is rounded and
nothing hides below rounding. Four calls with the queries of other tokens set to zero (every second, every
other pair, and their complements) tell apart any two tokens whose distance is no multiple of four.
Exercised by the silent rows.
Fires on: any row that another row, another sequence, a buffer or a value reaches other than through its own
query, however faintly.
Silent on: leaks through the scores (`causality`, `causality-cuts`).
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from ...kernels.interface import RunResult
from ..inputs import Inputs
from ..nonfinite import class_of, place_of_row
from ..report_words import full
from ..trial import Trial
from ..verdict import Outcome, PlaceClass
from .expectation import Expectation, Plan, no_rows

NAME = "silent-queries"
PERIODS = (1, 2)


def plan(inputs: Inputs, *, seed: int) -> Plan:
    """Both halves of each pattern; nothing depends on the seed."""
    del seed
    if inputs.n_tokens < 2:
        return "fewer than two tokens"
    token = torch.arange(inputs.n_tokens, device=inputs.device)
    return [_call(inputs, (token // period) % 2 == half) for period in PERIODS for half in (0, 1)]


def _call(inputs: Inputs, silent: Tensor) -> Expectation:
    rows = silent.nonzero().flatten()
    q = inputs.q.clone()
    q[rows] = 0
    return Expectation(
        relation=NAME,
        inputs=msgspec.structs.replace(inputs, q=q),
        what=f"{len(rows)} queries",
        verb="set to zero",
        output_rows=no_rows(inputs.device),
        state_rows=no_rows(inputs.device),
        exercised=len(rows),
        judge=lambda trial, result: judge(trial, rows, result),
    )


def judge(trial: Trial, rows: Tensor, result: RunResult) -> Outcome:
    """rows: [R] packed tokens whose query was zero. The largest entry names the place."""
    output = result.outputs["output"].to(trial.output.device)[rows]
    size = output.flatten(2).double().abs().nan_to_num(torch.inf, torch.inf).amax(-1)
    if not bool((size > 0).any()):
        return Outcome(check=NAME, tier=4, status="ok", numbers={"rows": len(rows)})
    at, head = divmod(int(size.argmax()), size.shape[1])
    values = output[at, head].flatten()
    bad = values[~torch.isfinite(values)]
    kind: PlaceClass = class_of(float(bad[0])) if len(bad) else "wrong"
    tiles = trial.witness.output_tiles(trial.capabilities_chunk)
    place = place_of_row(tiles, int(rows[at]), head, kind)
    loud = int((size > 0).sum())
    return Outcome(
        check=NAME,
        tier=4,
        status="fires",
        place=place,
        reason=f"{NAME}: {loud} of {size.numel()} rows with a query of zero are not zero, most {full(place)} "
        f"({float(size.max()):.3g}): something else than the query reaches them",
        numbers={"rows": len(rows), "loud": loud, "would_pass": {"atol": float(size.max())}},
    )
