"""Non-finite values as classes of their own: nan, +inf, -inf, each against the truth's own mask.

The idea: a kernel's infinity is a fault only where the truth, stored in the same dtype, is finite; so the
truth is cast to what the kernel stores before the masks are compared, and values that honest rounding may
push over the dtype's largest number are left open. Sizes of finite errors are `tiles`' subject.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .threads import one_thread
from .tiles import BLOCK_ENTRIES, TileMap
from .verdict import Place, PlaceClass

CLASSES: tuple[PlaceClass, ...] = ("nan", "+inf", "-inf")
# Relative distance from the largest number within which rounding alone may decide (16 bf16 half-ulps).
EDGE = 2.0**-4


@dataclass(frozen=True)
class NonFinite:
    """Where a kernel's tensor is not finite; tables are [R, H] int64 counts of entries."""

    unexplained: Tensor
    """Not finite although the stored truth is finite."""
    anywhere: Tensor
    """Not finite at all."""
    missing: Tensor
    """Finite although the stored truth is not."""
    first_class: PlaceClass | None
    """Class of the first unexplained entry, or of the first one at all where none is unexplained."""
    by_class: dict[str, int]
    """Unexplained entries by class."""

    @property
    def n_unexplained(self) -> int:
        return int(self.unexplained.sum())

    @property
    def n_anywhere(self) -> int:
        return int(self.anywhere.sum())


def class_of(value: float) -> PlaceClass:
    """Class of one non-finite number."""
    if value != value:
        return "nan"
    return "+inf" if value > 0 else "-inf"


@one_thread()
def compare_masks(got: Tensor, want: Tensor) -> NonFinite:
    """Count non-finite entries per row and head. got: [R, H, ...]; want: the same shape, float64."""
    rows, heads = got.shape[:2]
    got, want = got.flatten(2), want.flatten(2)
    counts = torch.zeros(3, rows, heads, dtype=torch.int64, device=want.device)
    by_class: dict[str, int] = dict.fromkeys(CLASSES, 0)
    largest = float(torch.finfo(got.dtype).max) * (1 - EDGE)
    entries = got.shape[2]
    block = max(1, BLOCK_ENTRIES // max(1, heads * entries))
    for start in range(0, rows if entries else 0, block):
        part = slice(start, start + block)
        if bool(torch.isfinite(got[part].sum(dtype=torch.float64) + want[part].sum())):
            continue  # every entry of the block is finite on both sides
        bad = ~torch.isfinite(got[part])
        expected = ~torch.isfinite(want[part])
        # Beyond (or at the edge of) the dtype's range a finite truth is stored as an infinity too.
        open_ = expected | (want[part].abs() > largest)
        counts[2, part] = (expected & ~bad).sum(-1)
        if not bool(bad.any()):
            continue
        fresh = bad & ~open_
        counts[0, part], counts[1, part] = fresh.sum(-1), bad.sum(-1)
        values = got[part][fresh]
        by_class["nan"] += int(torch.isnan(values).sum())
        by_class["+inf"] += int((values == torch.inf).sum())
        by_class["-inf"] += int((values == -torch.inf).sum())
    first = _first_value(got, want, counts, largest)
    return NonFinite(counts[0], counts[1], counts[2], first, by_class)


def _first_value(got: Tensor, want: Tensor, counts: Tensor, largest: float) -> PlaceClass | None:
    table = counts[0] if bool(counts[0].any()) else counts[1]
    where = table.nonzero()
    if len(where) == 0:
        return None
    row, head = where[0].tolist()
    bad = ~torch.isfinite(got[row, head])
    if table is counts[0] or bool(counts[0].any()):
        bad &= torch.isfinite(want[row, head]) & (want[row, head].abs() <= largest)
    return class_of(float(got[row, head][bad][0]))


def first_place(found: NonFinite, tiles: TileMap, *, unexplained: bool = True) -> Place | None:
    """The first non-finite place in packed order: earliest token, then head."""
    table = found.unexplained if unexplained else found.anywhere
    where = table.nonzero()
    if len(where) == 0 or found.first_class is None:
        return None
    row, head = where[0].tolist()
    return place_of_row(tiles, row, head, found.first_class)


def place_of_row(tiles: TileMap, row: int, head: int | None, class_: PlaceClass) -> Place:
    """Name a row of a tile map: sequence, chunk and token count inside the sequence."""
    token = None if tiles.token_of_row is None else int(tiles.token_of_row[row])
    chunk = None if token is None or tiles.chunk_size is None else token // tiles.chunk_size
    return Place(
        tensor=tiles.tensor,
        class_=class_,
        sequence=int(tiles.sequence_of_row[row]),
        head=head,
        chunk=chunk,
        token=token,
    )
