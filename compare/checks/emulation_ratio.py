"""Emulation ratio: a kernel errs no more than its own algorithm does in its own precision.

Statement. R = err(kernel against truth) / D per tile, D the largest error of the emulation over
round-to-nearest and the honest variants (numerics.md, tier 3). A sound kernel has R_rms <= 1.5 and
R_max <= 4; with few entries or few tokens in a tile the limits widen as a chi distribution does. One row (a
token of a head) of a sound kernel stays within 6 times the larger of its own and its tile's honest RMS.
Fires on: a tile (or a head's pooled small tiles) above a limit by more than the floor: half an ulp RMS (and
2 ulp of float32), 2 ulp for a single entry, of the truth in the dtype that the kernel stores.
Silent on: error that the precision explains. Non-finite entries are `non-finite`'s subject.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from scipy.stats import chi2
from torch import Tensor

from ..nonfinite import place_of_row
from ..report_words import number, where
from ..tiles import max_over_tiles, unit_roundoff
from ..trial import TENSORS, Measured, Trial
from ..verdict import Outcome, Place
from ..yardstick import U32, Scale

NAME, TIER = "emulation-ratio", 3
# Ascend's operator standard for RMS. Over 2,100 runs of honest kernels on all families (other chunk sizes,
# orders, inverses and precisions than the yardstick's) the largest were 1.57 (RMS, in a tile whose limit
# widens), 3.0 (largest entry) and 1.6 (one row); distributions in docs/verdicts.md.
RMS_LIMIT, MAX_LIMIT, ROW_LIMIT = 1.5, 4.0, 6.0
# Where a few float32 roundings make the honest error, another sound order of sums may err several times as
# much: by the fitted tail of sound kernels this leaves one false alarm in 200,000 judgements or fewer
# (bench/calibrate.py; without it, one in 1,000).
FEW_ROUNDINGS = 3.0
# Chance that one tile's honest error exceeds the widened limit.
TAIL = 1e-9
# Draws are told apart by quarters.
DRAW_STEPS = 4
# In a tile that is wrong, a row is named from this multiple on.
NAMED_ROW = 4.0


def widening(draws: Tensor) -> Tensor:
    """Factors, 1 or more, by which honest errors over so few independent draws may exceed their RMS."""
    values, place = torch.unique((draws * DRAW_STEPS).round().clamp(min=1), return_inverse=True)
    factors = [_widening(value / DRAW_STEPS) for value in values.tolist()]
    return torch.tensor(factors, dtype=torch.float64, device=draws.device)[place]


@lru_cache(maxsize=65536)
def _widening(draws: float) -> float:
    spread = (float(chi2.isf(TAIL, draws)) / draws) ** 0.5
    return max(1.0, 1.2 * float(spread) / RMS_LIMIT)


@dataclass(frozen=True)
class Ratios:
    """Tier 3's tables for one tensor."""

    rms: Tensor
    """[P, H] ratio of RMS errors (inf where the emulation is exact and the kernel is not)."""
    peak: Tensor
    """[P, H] ratio of largest errors, of entries beyond the floor."""
    rms_limit: Tensor
    """[P, H]."""
    peak_limit: Tensor
    row: Tensor
    """[P, H] largest ratio of a single row."""
    row_limit: Tensor
    bad: Tensor
    """[P, H] bool."""
    score: Tensor
    """[P, H] how far above its limit, 1 being at it; 0 where not above the floor."""


def ratios(measured: Measured, scale: Scale) -> Ratios:
    """Compare a kernel's errors with the emulation's, pool by pool."""
    tiles, pools = measured.by_tile, scale.pools
    rms = pools.rms(tiles.rms, tiles.entries)
    peak, clear = pools.peak(tiles.peak), pools.peak(tiles.clear)
    stored = unit_roundoff(measured.got.dtype)
    floor = max(stored, 4 * U32) * pools.rms(tiles.truth_rms, tiles.entries)
    loose = torch.where(scale.few, FEW_ROUNDINGS, 1.0)
    wide = widening(scale.draws) * loose
    # What the stored dtype resolves of a tile's largest entry is no error, even where the emulation is exact.
    least = max(stored, 4 * U32) * pools.peak(tiles.truth_peak)
    over_rms, over_peak = _ratio(rms, scale.rms), _ratio(clear, torch.maximum(scale.peak, least))
    over_row = pools.peak(max_over_tiles(row_ratios(measured, scale), measured.tiles))
    score = torch.where(rms > floor, over_rms / (RMS_LIMIT * wide), 0.0)
    score = torch.maximum(
        score, torch.maximum(over_peak / (MAX_LIMIT * wide), over_row / (ROW_LIMIT * loose))
    )
    return Ratios(
        rms=over_rms,
        peak=_ratio(peak, scale.peak),
        rms_limit=RMS_LIMIT * wide,
        peak_limit=MAX_LIMIT * wide,
        row=over_row,
        row_limit=ROW_LIMIT * loose,
        bad=score > 1,
        score=score,
    )


def _ratio(error: Tensor, honest: Tensor) -> Tensor:
    """error / honest, 0 / 0 being 0."""
    return torch.where(error > 0, error / honest, 0.0)


def check(trial: Trial) -> Outcome:
    """Both tensors; the tile with the largest ratio decides."""
    if trial.witness.inputs.g.ndim == 3:
        reason = "no emulation for a decay per key channel"
        return Outcome(check=NAME, tier=TIER, status="not-applicable", reason=reason)
    return against(trial, trial.measured)


def against(trial: Trial, measured_by_name: dict[str, Measured]) -> Outcome:
    """The check on given measurements (against the pure truth, say) with the trial's yardstick."""
    tables = {
        name: ratios(measured_by_name[name], trial.yardstick.of(name))
        for name in TENSORS
        if name in measured_by_name
    }
    largest = {f"{name}_rms_ratio": _largest(t.rms) for name, t in tables.items()}
    largest |= {f"{name}_max_ratio": _largest(t.peak) for name, t in tables.items()}
    numbers = {
        **largest,
        "rms_limit": _limit_at_largest([(t.rms, t.rms_limit) for t in tables.values()]),
        "max_limit": _limit_at_largest([(t.peak, t.peak_limit) for t in tables.values()]),
        "profile": trial.yardstick.profile,
        "runs": trial.yardstick.runs,
    }
    firing = {name: t for name, t in tables.items() if bool(t.bad.any())}
    if not firing:
        return Outcome(check=NAME, tier=TIER, status="ok", numbers=numbers)
    name = max(firing, key=lambda n: _largest(firing[n].score))
    return _fires(trial, name, measured_by_name[name], firing[name], numbers)


def _limit_at_largest(tables: list[tuple[Tensor, Tensor]]) -> float:
    """The limit of the tile with the largest ratio; 0 where there is none."""
    found = [(float(r.max()), float(limit.flatten()[r.argmax()])) for r, limit in tables if r.numel()]
    return max(found, default=(0.0, 0.0))[1]


def _largest(table: Tensor) -> float:
    return float(table.max()) if table.numel() else 0.0


def _fires(trial: Trial, name: str, measured: Measured, table: Ratios, numbers: dict[str, object]) -> Outcome:
    scale = trial.yardstick.of(name)
    pool, head = _worst(table, measured, scale)
    tile = _worst_tile(measured, scale, pool, head)
    place = _place(measured, scale, tile, head)
    tiles = measured.by_tile
    n_bad, n_all = int(table.bad.sum()), table.bad.numel()
    many = f"{n_bad} of {n_all} tiles" if name == "output" else f"{n_bad} of {n_all} (sequence, head) states"
    ratio, rule = _rule(table, pool, head)
    first = _first_bad(measured, scale, table)
    since = f"; first wrong at {where(first)}" if first is not None and first != place else ""
    error, truth = float(tiles.rms[tile, head]), float(tiles.truth_rms[tile, head])
    return Outcome(
        check=NAME,
        tier=TIER,
        status="fires",
        place=place,
        reason=f"{name} is wrong at {where(place)}: {rule}, relative RMS error "
        f"{number(_share(error, truth))}; {many} above the limit{since}",
        numbers={
            **numbers,
            "ratio": ratio,
            "bad_tiles": n_bad,
            "tiles": n_all,
            "tile_rms_error": error,
            "tile_truth_rms": truth,
            "would_pass": {"atol": float(tiles.peak.max()), "rms_ratio": _largest(table.rms)},
        },
    )


def _rule(table: Ratios, pool: int, head: int) -> tuple[float, str]:
    """The ratio that is furthest above its limit, and the rule in words."""
    candidates = (
        ("RMS error", float(table.rms[pool, head]), float(table.rms_limit[pool, head])),
        ("largest error", float(table.peak[pool, head]), float(table.peak_limit[pool, head])),
        ("RMS error of one row", float(table.row[pool, head]), float(table.row_limit[pool, head])),
    )
    name, ratio, limit = max(candidates, key=lambda c: c[1] / c[2])
    return ratio, f"{name} is {number(ratio)} times the emulation's (limit {limit:.3g})"


def _share(error: float, truth: float) -> float:
    return error / truth if truth else (float("inf") if error else 0.0)


def _worst(table: Ratios, measured: Measured, scale: Scale) -> tuple[int, int]:
    """Pool and head with the largest score; among infinite ones, the largest error against the truth."""
    score = table.score
    if bool(torch.isinf(score).any()):
        tiles = measured.by_tile
        error = scale.pools.rms(tiles.rms, tiles.entries)
        score = torch.where(torch.isinf(score), error, -1.0)
    pool, head = divmod(int(score.argmax()), score.shape[1])
    return pool, head


def _worst_tile(measured: Measured, scale: Scale, pool: int, head: int) -> int:
    """The tile of a pool with the largest error against its own rows' honest error."""
    members = (scale.pools.pool_of_tile == pool).nonzero().flatten()
    error = measured.by_tile.rms[members, head]
    return int(members[error.argmax()])


def row_ratios(measured: Measured, scale: Scale) -> Tensor:
    """[R, H] RMS error of a row over the larger of its own and its tile's honest one; 0 within the floor."""
    entries = max(1, measured.rows.entries)
    rms = (measured.rows.square / entries).sqrt()
    truth = (measured.rows.truth_square / entries).sqrt()
    floor = 2 * max(unit_roundoff(measured.got.dtype), 4 * U32) * truth
    # A row's honest error can be small by luck; its tile's is not.
    typical = scale.rms[scale.pools.pool_of_tile][measured.tiles.tile_of_row]
    return torch.where(rms > floor, rms / torch.maximum(scale.row_rms, typical), 0.0)


def wrong_rows(measured: Measured, scale: Scale) -> Tensor:
    """[R, H] bool: rows that are wrong by themselves, far beyond what honest rows of the same place err."""
    typical_peak = scale.peak[scale.pools.pool_of_tile][measured.tiles.tile_of_row]
    by_peak = measured.rows.clear > MAX_LIMIT * torch.maximum(scale.row_peak, typical_peak)
    return (row_ratios(measured, scale) > NAMED_ROW) | by_peak


def _place(measured: Measured, scale: Scale, tile: int, head: int) -> Place:
    """The tile, and the first wrong token in it where one stands out."""
    rows = (measured.tiles.tile_of_row == tile).nonzero().flatten()
    wrong = wrong_rows(measured, scale)[rows, head].nonzero().flatten()
    row = int(rows[wrong[0]]) if len(wrong) else int(rows[0])
    place = place_of_row(measured.tiles, row, head, "wrong")
    if len(wrong):
        return place
    return Place(tensor=place.tensor, class_="wrong", sequence=place.sequence, head=head, chunk=place.chunk)


def _first_bad(measured: Measured, scale: Scale, table: Ratios) -> Place | None:
    """The earliest wrong row of a tile above its limit, in packed order."""
    in_bad = table.bad[scale.pools.pool_of_tile][measured.tiles.tile_of_row]
    where_ = (wrong_rows(measured, scale) & in_bad).nonzero()
    if len(where_) == 0:
        return None
    row, head = where_[0].tolist()
    return place_of_row(measured.tiles, row, head, "wrong")
