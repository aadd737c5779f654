"""Random choices of one fuzz case: a function of the run's seed, the kernel and the case's number.

The idea: nothing depends on the order in which cases are made, so numbers can be dealt to any number of
machines, and a case that was in flight is made again as it was.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """Draws for one case."""

    def __init__(self, *key: object) -> None:
        digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
        self._random = random.Random(int.from_bytes(digest, "little"))

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def between(self, low: int, high: int) -> int:
        """low..high, both included."""
        return self._random.randint(low, high)

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)

    def one_of(self, choices: Sequence[T]) -> T:
        return choices[self._random.randrange(len(choices))]

    def weighted(self, weights: Mapping[str, float]) -> str:
        """One of the keys, as often as its weight says."""
        return self._random.choices(list(weights), weights=list(weights.values()))[0]
