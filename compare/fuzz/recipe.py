"""A recipe: how to make one fuzz case, as plain data that a store, a generator and a person can read.

The idea: a case is a list of pieces (windows of stock: a synthetic family's tokens, or a capture's), a few
twists on top, and the axes on which its call departs from the baseline. A recipe says all of it in a line of
JSON, so that a case is made again from its row, and mutating a case is editing data.
"""

from __future__ import annotations

import msgspec

Start = str  # fresh, zeros or random


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """One sequence: a window of stock."""

    source: str
    """A family's name, or `capture.N` for the run's capture number N."""
    stock: int
    """Number of the stock of that source; a capture has one, 0."""
    at: int
    """First token of the window."""
    length: int
    start: str
    """The state it starts from: `fresh`, `zeros` or `random` (a capture's own where the window starts
    there)."""


class Twist(msgspec.Struct, frozen=True, array_like=True):
    """One change on top of the pieces, of `twists.TWISTS`."""

    name: str
    sequence: int
    """Sequence that it is made in; -1: in all."""
    head: int
    """Value head; -1: all."""
    at: int
    """Token inside the sequence (-1: the last; beyond the end it wraps round)."""
    size: float


class Recipe(msgspec.Struct, frozen=True, omit_defaults=True, rename={
    "shape": "s", "pieces": "p", "twists": "t", "deviations": "d", "made_by": "by", "parent": "of",
}):  # fmt: skip
    """One case and how it is called."""

    shape: int
    """Number of the run's shape."""
    pieces: tuple[Piece, ...]
    twists: tuple[Twist, ...] = ()
    deviations: dict[str, str] = {}
    """{axis: value} other than the baseline's."""
    made_by: str = ""
    """Generator."""
    parent: int | None = None
    """Number of the corpus case that it was mutated from."""

    @property
    def lengths(self) -> list[int]:
        return [piece.length for piece in self.pieces]

    @property
    def n_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def families(self) -> list[str]:
        """Sources, each once."""
        return list(dict.fromkeys(piece.source for piece in self.pieces))


def to_json(recipe: Recipe) -> str:
    return msgspec.json.encode(recipe).decode()


def from_json(text: str) -> Recipe:
    return msgspec.json.decode(text, type=Recipe)
