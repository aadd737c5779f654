"""Did a relation hold: the rows that an expectation names, bit for bit or within tier 3.

Statement. A relation that a contract promises holds bit for bit. One that is merely observed may lose bits
(another path for another shape is legitimate) but no more than honest rounding moves a result; where both
calls have the same shapes and repeat bit for bit, lost bits are a suspect. A relation that is not promised
is not asked for. It counts only if it was exercised: the change must show where it is allowed to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.contract import Promise
from ..checks.emulation_ratio import FEW_ROUNDINGS, MAX_LIMIT, RMS_LIMIT, widening
from ..draws import draws_of_rows
from ..nonfinite import class_of, place_of_row
from ..report_words import full
from ..tiles import TileMap, max_over_tiles, row_errors, sum_over_tiles
from ..trial import Trial
from ..verdict import Outcome, Place, PlaceClass
from ..yardstick import Scale
from .expectation import Expectation

TIER = 4
# Two honest runs differ by sqrt(2) times what each errs.
TWO_RUNS = 2.0**0.5


@dataclass(frozen=True)
class Moved:
    """Where one tensor of the changed call differs from the first call's."""

    tensor: str
    rows: Tensor
    """[R, H] bool over the first call's rows."""
    beyond: Tensor
    """[M, H] bool: tiles in which the difference exceeds honest rounding."""
    first: Place
    largest: float


def compare_runs(
    trial: Trial,
    expected: Expectation,
    output: Tensor,
    state: Tensor | None,
    *,
    promise: Promise,
    steady: bool,
) -> Outcome:
    """Judge one changed call.

    output, state: what the kernel returned for `expected.inputs`. steady: the kernel repeats bit for bit.
    """
    name = expected.relation
    if not _exercised(trial, expected, output):
        reason = f"not exercised: with {expected.what} changed, the kernel's answer stays the same everywhere"
        return Outcome(check=name, tier=TIER, status="not-applicable", reason=reason)
    found = [
        m
        for m in (
            _moved(trial, expected, "output", trial.output, output, expected.output_rows),
            _moved(trial, expected, "state", trial.state, state, expected.state_rows),
        )
        if m is not None
    ]
    n_rows = len(expected.output_rows[0]) + len(expected.state_rows[0])
    if not found:
        return Outcome(check=name, tier=TIER, status="ok", numbers={"rows": n_rows, "bits": "equal"})
    worst = next((m for m in found if bool(m.beyond.any())), found[0])
    beyond = bool(worst.beyond.any())
    numbers = {
        "rows": n_rows,
        "moved_rows": int(worst.rows.sum()),
        "largest_difference": worst.largest,
        "promise": promise,
        "would_pass": {"atol": worst.largest},
    }
    reason = _reason(expected, worst, promise, beyond)
    if promise == "promised" or beyond:
        return Outcome(
            check=name, tier=TIER, status="fires", reason=reason, place=worst.first, numbers=numbers
        )
    status = "suspect" if expected.same_shape and not expected.lenient and steady else "ok"
    return Outcome(check=name, tier=TIER, status=status, reason=reason, place=worst.first, numbers=numbers)  # type: ignore[arg-type]


def _reason(expected: Expectation, worst: Moved, promise: Promise, beyond: bool) -> str:
    size = "beyond what rounding explains" if beyond else "within the limit of tier 3"
    change = (
        "between two runs of the same input" if expected.relation == "run-to-run" else f"with {expected.what}"
    )
    many = f"{int(worst.rows.sum())} rows of {worst.tensor}"
    if expected.relation == "run-to-run":
        moved = f"{many} move {change}"
    else:
        moved = f"{many} that must not move do so {change} {expected.verb}"
    first = f"first {full(worst.first)}, by up to {worst.largest:.3g}"
    return f"{expected.relation} ({promise}): {moved}, {first}, {size}"


def _exercised(trial: Trial, expected: Expectation, output: Tensor) -> bool:
    rows = expected.changed_rows
    return rows is None or len(rows) == 0 or moved_rows(trial, expected, output) > 0


def moved_rows(trial: Trial, expected: Expectation, output: Tensor) -> int:
    """Rows of the changed call that differ from the first call's, where a change is allowed."""
    rows = expected.changed_rows
    if rows is None:
        return 0
    same = _same(trial.output[rows], output.to(trial.output.device)[rows])
    return int((~same.flatten(1).all(-1)).sum())


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (torch.isnan(a) & torch.isnan(b))


def _moved(
    trial: Trial,
    expected: Expectation,
    name: str,
    first: Tensor | None,
    again: Tensor | None,
    rows: tuple[Tensor, Tensor],
) -> Moved | None:
    """Compare one tensor; None where every bit is the same."""
    base_rows, own_rows = rows
    if first is None or again is None or len(base_rows) == 0:
        return None
    base, own = first[base_rows], again.to(first.device)[own_rows]
    if expected.heads is not None:
        own = own[:, expected.heads]
    if expected.factor != 1.0:
        base = base * expected.factor
    differs = ~_same(base, own).flatten(2).all(-1)
    if not bool(differs.any()):
        return None
    tiles = (
        trial.witness.state_tiles if name == "state" else trial.witness.output_tiles(trial.capabilities_chunk)
    )
    all_rows = torch.zeros(first.shape[:2], dtype=torch.bool, device=first.device)
    all_rows[base_rows] = differs
    beyond, largest = _beyond(trial, expected, name, base, own, base_rows, tiles)
    return Moved(
        name, all_rows, beyond, _first(all_rows, beyond, tiles, expected, base, own, base_rows), largest
    )


def _beyond(
    trial: Trial,
    expected: Expectation,
    name: str,
    base: Tensor,
    own: Tensor,
    base_rows: Tensor,
    tiles: TileMap,
) -> tuple[Tensor, float]:
    """Tiles whose difference exceeds two honest runs', and the largest difference."""
    errors = row_errors(own, base.double())
    table = torch.zeros(tiles.n_rows, base.shape[1], dtype=torch.float64, device=base.device)
    square, clear, count = table.clone(), table.clone(), table.clone()
    square[base_rows], clear[base_rows] = errors.square, errors.clear
    # An entry that is finite in one call only has no size; it is beyond any rounding.
    broken = (torch.isfinite(base) != torch.isfinite(own)).flatten(2).any(-1)
    clear[base_rows] = torch.where(broken, torch.inf, clear[base_rows])
    count[base_rows] = float(errors.entries)
    entries = sum_over_tiles(count, tiles)
    rms = (sum_over_tiles(square, tiles) / entries.clamp(min=1)).sqrt()
    peak = max_over_tiles(clear, tiles)
    largest = float("inf") if bool(broken.any()) else float(errors.peak.max())
    if trial.witness.inputs.g.ndim == 3:
        return peak > 0, largest
    scale = trial.yardstick.of(name)
    honest = TWO_RUNS * abs(expected.factor)
    pool = scale.pools.pool_of_tile
    # Rows are compared that may be a part of their tile; a state is compared whole.
    rows = entries / max(1, errors.entries)
    draws = scale.draws[pool] if base.ndim == 4 else draws_of_rows(rows, entries)
    wide = widening(draws.clamp(min=1)) * torch.where(scale.few, FEW_ROUNDINGS, 1.0)[pool]
    beyond = (rms > RMS_LIMIT * wide * honest * scale.rms[pool]) & (peak > 0)
    return beyond | (peak > MAX_LIMIT * wide * honest * _tile_peak(scale)), largest


def _tile_peak(scale: Scale) -> Tensor:
    return scale.peak[scale.pools.pool_of_tile]


def _first(
    moved: Tensor,
    beyond: Tensor,
    tiles: TileMap,
    expected: Expectation,
    base: Tensor,
    own: Tensor,
    base_rows: Tensor,
) -> Place:
    """The first moved row, in a tile beyond rounding where there is one."""
    inside = moved & beyond[tiles.tile_of_row] if bool(beyond.any()) else moved
    candidates = inside if bool(inside.any()) else moved
    row, head = candidates.nonzero()[0].tolist()
    at = int((base_rows == row).nonzero()[0])
    kind: PlaceClass = "moves" if expected.relation == "run-to-run" else "wrong"
    bad = ~torch.isfinite(own[at, head]) & torch.isfinite(base[at, head])
    if bool(bad.any()):
        kind = class_of(float(own[at, head][bad][0]))
    return place_of_row(tiles, row, head, kind)
