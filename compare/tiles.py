"""Tiles: errors per (sequence, head, chunk), found without a loop over tiles.

The idea: an error is first summed over one row (a token of one head, or one sequence's whole state of
one head); a row belongs to one tile, so everything per tile is a scatter of [rows, heads] tables, which
are small. Work on the entries themselves goes block by block, so that memory stays bounded at any T.
What an error is worth is for `yardstick` and the checks to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .threads import one_thread

# Entries handled at once: 2^18 float64 values are 2 MB per temporary, which stays in a cache.
BLOCK_ENTRIES = 1 << 18
# A tile with fewer entries is judged together with its head's other small tiles.
SMALL_TILE = 256


@dataclass(frozen=True)
class TileMap:
    """Which tile a row belongs to. Rows are packed tokens, or sequences for a state."""

    tensor: str
    """`output` or `state`."""
    tile_of_row: Tensor
    """[R] int64."""
    sequence_of_row: Tensor
    """[R] int64."""
    token_of_row: Tensor | None
    """[R] int64, index inside its sequence; None for states."""
    sequence: Tensor
    """[M] int64 sequence of a tile."""
    chunk: Tensor | None
    """[M] int64 chunk inside its sequence; None for states."""
    rows: Tensor
    """[M] int64 number of rows of a tile."""
    chunk_size: int | None = None
    group: Tensor | None = None
    """[M] int64: tiles are pooled inside their group only (of several cases judged at once); None: one."""

    @property
    def n_tiles(self) -> int:
        return self.sequence.shape[0]

    @property
    def n_rows(self) -> int:
        return self.tile_of_row.shape[0]

    def to(self, device: torch.device) -> TileMap:
        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device)

        return TileMap(
            self.tensor,
            self.tile_of_row.to(device),
            self.sequence_of_row.to(device),
            move(self.token_of_row),
            self.sequence.to(device),
            move(self.chunk),
            self.rows.to(device),
            self.chunk_size,
            move(self.group),
        )


def map_tokens(cu_seqlens: Tensor, chunk_size: int) -> TileMap:
    """Tiles of the output: chunks count from each sequence's own start. cu_seqlens: [N+1] int64."""
    cu = cu_seqlens.long()
    lengths = cu[1:] - cu[:-1]
    sequence_of_row = torch.repeat_interleave(torch.arange(len(lengths), device=cu.device), lengths)
    token = torch.arange(len(sequence_of_row), device=cu.device) - cu[:-1][sequence_of_row]
    chunks = (lengths + chunk_size - 1) // chunk_size
    base = chunks.cumsum(0) - chunks
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=cu.device), chunks)
    tile_of_row = base[sequence_of_row] + token // chunk_size
    return TileMap(
        tensor="output",
        tile_of_row=tile_of_row,
        sequence_of_row=sequence_of_row,
        token_of_row=token,
        sequence=sequence,
        chunk=torch.arange(len(sequence), device=cu.device) - base[sequence],
        rows=torch.bincount(tile_of_row, minlength=len(sequence)),
        chunk_size=chunk_size,
    )


def map_states(n_sequences: int, device: torch.device | None = None) -> TileMap:
    """Tiles of a final state [N, HV, K, V]: one per sequence (and head)."""
    each = torch.arange(n_sequences, device=device)
    return TileMap("state", each, each, None, each, None, torch.ones_like(each))


@dataclass(frozen=True)
class RowErrors:
    """Errors summed over the entries of one row and head; [R, H] float64. Non-finite entries are left out."""

    square: Tensor
    """Sum of squared errors."""
    peak: Tensor
    """Largest absolute error."""
    clear: Tensor
    """Largest absolute error among entries that err by more than 2 ulp of the truth (else 0)."""
    signed: Tensor
    """Sum of errors."""
    truth_square: Tensor
    """Sum of squares of the truth."""
    truth_peak: Tensor
    """Largest magnitude of the truth."""
    entries: int
    """Entries of a row."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to nearest."""
    return float(torch.finfo(dtype).eps) / 2


@one_thread()
def row_errors(got: Tensor, want: Tensor, *, stored: torch.dtype | None = None) -> RowErrors:
    """Compare two tensors row by row. got: [R, H, ...] any float dtype; want: the same shape, float64.

    stored: dtype whose ulp is the floor of `clear`; got's own where None.
    """
    rows, heads = got.shape[:2]
    got, want = got.flatten(2), want.flatten(2)
    stored = got.dtype if stored is None else stored
    # 2 ulp: an ulp is at most 2 u |x|, and never less than the smallest subnormal step.
    relative, least = (
        4 * unit_roundoff(stored),
        2 * float(torch.finfo(stored).smallest_normal) * unit_roundoff(stored),
    )
    entries = got.shape[2]
    table = torch.zeros(6, rows, heads, dtype=torch.float64, device=want.device)
    block = max(1, BLOCK_ENTRIES // max(1, heads * entries))
    for start in range(0, rows if entries else 0, block):
        part = slice(start, start + block)
        exact = want[part]
        error = got[part].to(exact.dtype) - exact
        if not bool(torch.isfinite(error.sum())):
            # inf - inf and NaN: such an entry has a class, not a size.
            usable = torch.isfinite(error)
            error = torch.where(usable, error, 0.0)
            exact = torch.where(usable, exact, 0.0)
        size = error.abs()
        table[0, part] = torch.linalg.vector_norm(error, dim=-1).square_()
        table[1, part] = size.amax(-1)
        table[2, part] = torch.where(size > exact.abs() * relative + least, size, 0.0).amax(-1)
        table[3, part] = error.sum(-1)
        table[4, part] = torch.linalg.vector_norm(exact, dim=-1).square_()
        table[5, part] = exact.abs().amax(-1)
    return RowErrors(table[0], table[1], table[2], table[3], table[4], table[5], entries)


@dataclass(frozen=True)
class TileErrors:
    """Errors per tile and head; [M, H] float64."""

    rms: Tensor
    peak: Tensor
    clear: Tensor
    mean: Tensor
    truth_rms: Tensor
    truth_peak: Tensor
    entries: Tensor
    """[M] number of entries of a tile of one head."""


def sum_over_tiles(per_row: Tensor, tiles: TileMap) -> Tensor:
    """[R, H] -> [M, H]."""
    result = per_row.new_zeros(tiles.n_tiles, per_row.shape[1])
    return result.index_add_(0, tiles.tile_of_row, per_row)


def max_over_tiles(per_row: Tensor, tiles: TileMap) -> Tensor:
    """[R, H] of values >= 0 -> [M, H]."""
    index = tiles.tile_of_row[:, None].expand_as(per_row)
    result = per_row.new_zeros(tiles.n_tiles, per_row.shape[1])
    return result.scatter_reduce_(0, index, per_row, "amax")


def tile_errors(rows: RowErrors, tiles: TileMap) -> TileErrors:
    """Gather rows into their tiles."""
    entries = tiles.rows * rows.entries
    count = entries.clamp(min=1).to(torch.float64)[:, None]
    return TileErrors(
        rms=(sum_over_tiles(rows.square, tiles) / count).sqrt(),
        peak=max_over_tiles(rows.peak, tiles),
        clear=max_over_tiles(rows.clear, tiles),
        mean=sum_over_tiles(rows.signed, tiles) / count,
        truth_rms=(sum_over_tiles(rows.truth_square, tiles) / count).sqrt(),
        truth_peak=max_over_tiles(rows.truth_peak, tiles),
        entries=entries,
    )


@dataclass(frozen=True)
class Pools:
    """Tiles as they are judged: a large one by itself, the small ones of a head together."""

    pool_of_tile: Tensor
    """[M] int64; the last pool (of each group) holds all small tiles."""
    n_pools: int
    entries: Tensor
    """[P] entries of a pool of one head."""
    rows: Tensor
    """[P]."""

    def rms(self, tile_rms: Tensor, entries: Tensor) -> Tensor:
        """[M, H] root mean squares -> [P, H]."""
        total = tile_rms.new_zeros(self.n_pools, tile_rms.shape[1])
        total.index_add_(0, self.pool_of_tile, tile_rms.square() * entries[:, None])
        return (total / self.entries.clamp(min=1)[:, None]).sqrt()

    def peak(self, tile_peak: Tensor) -> Tensor:
        """[M, H] maxima -> [P, H]."""
        index = self.pool_of_tile[:, None].expand_as(tile_peak)
        result = tile_peak.new_zeros(self.n_pools, tile_peak.shape[1])
        return result.scatter_reduce_(0, index, tile_peak, "amax")


def pool_small(tiles: TileMap, entries_per_row: int) -> Pools:
    """Pool the tiles with fewer than SMALL_TILE entries, those of a group together."""
    entries = tiles.rows * entries_per_row
    small = entries < SMALL_TILE
    n_large = int((~small).sum())
    group = torch.zeros_like(entries) if tiles.group is None else tiles.group
    groups, of_small = torch.unique(group[small], return_inverse=True)
    pool = (~small).long().cumsum(0) - 1
    pool[small] = n_large + of_small
    n_pools = n_large + len(groups)
    zeros = torch.zeros(n_pools, dtype=torch.int64, device=pool.device)
    return Pools(
        pool_of_tile=pool,
        n_pools=n_pools,
        entries=zeros.clone().index_add_(0, pool, entries),
        rows=zeros.clone().index_add_(0, pool, tiles.rows),
    )
