"""What a generator is, and what it may look at.

The idea: a generator is a function (Dice, Surroundings) -> Recipe | None. It draws only from the dice, looks
only at the surroundings, and returns None where it has nothing to offer (no captures, an empty corpus): then
another one is asked. So a case stays a function of (seed, number, corpus) whatever generators there are.

To add one: write `compare/fuzz/generators/NAME.py` with a `GENERATOR`, list it in `table.py`. A generator of
histories (`compare.life`) gives the recipe of the first call and puts the history into `deviations` under its
axis; a generator that needs more than a recipe can say extends `Recipe` and `build`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ..dice import Dice
from ..recipe import Recipe
from ..stock import Stockroom

# Numbers in a row that share a shape and a kind of families.
BLOCK = 64
RAW_EVERY = 8


class CorpusEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A case that raised a maximum."""

    number: int
    recipe: Recipe
    reason: str


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a kernel takes, as far as a generator needs it."""

    max_tokens: int
    """Of one case, all sequences together."""
    max_sequences: int = 8
    empties: str = "anywhere"
    """Where empty sequences may stand by the contract: `anywhere`, `end`, or `none`."""
    families: tuple[str, ...] = ()
    """Families whose cases the contract covers."""
    chunk_size: int = 64
    """Chunk that the kernel works in (64 where it has none: sequences are still cut there)."""


class Surroundings(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All that a case may depend on besides its dice."""

    stock: Stockroom
    limits: Limits
    corpus: Sequence[CorpusEntry] = ()
    """Of this case's lane, as it stood two windows ago."""
    deviations: Callable[[Dice], dict[str, str]]
    """Draws the axes on which a call departs from the baseline."""
    number: int
    """Of the case."""

    @property
    def shape(self) -> int:
        """The run's shape that cases of this block have: what flies together is judged together."""
        return self.number // BLOCK % len(self.stock.shapes)

    @property
    def families(self) -> tuple[str, ...]:
        """Families of this block: most blocks have those with normalised q and k, every eighth the rest."""
        raw = self.number // BLOCK % RAW_EVERY == RAW_EVERY - 1
        stock = self.stock
        wanted = tuple(f for f in self.limits.families if (stock.source(self.shape, f, 0).qk == "raw") == raw)
        return wanted or self.limits.families


class Generator(msgspec.Struct, frozen=True, kw_only=True):
    """One way to come by a case."""

    name: str
    what: str
    weight: float
    """How often it is asked, relative to the others."""
    draw: Callable[[Dice, Surroundings], Recipe | None]
