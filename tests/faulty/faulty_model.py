"""What the table of faults says of each: how it is broken, on which cases it must be found, and as what.

The idea: a fault is data. `edits` breaks a sound kernel at one point (`faulty_base`); `cases` are the inputs
on which a verdict must find it; `tiers`, `rules` and `spot` are what a right verdict may say. `unseen` is the
reason why no tier can see a fault, for those that none can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

# Tiers with a place on the case or its exact companion, in any precision.
ANY = (0, 1, 2, 3)


@dataclass(frozen=True)
class Spot:
    """Where a fault shows; an empty part allows anything. Indices count inside their sequence."""

    tensors: tuple[str, ...] = ()
    sequences: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    tokens: Callable[[int], bool] | None = None
    classes: tuple[str, ...] = ()

    def holds(self, place: Any) -> bool:
        """Whether a place of a verdict lies here. A chunk without a token counts as its tokens' first."""
        token_ok = self.tokens is None or place.token is None or self.tokens(place.token)
        return (
            (not self.tensors or place.tensor in self.tensors)
            and (not self.sequences or place.sequence in self.sequences)
            and (not self.heads or place.head in self.heads)
            and (not self.classes or place.class_ in self.classes)
            and token_ok
        )


@dataclass(frozen=True)
class Fault:
    """One faulty kernel."""

    edits: Mapping[str, Callable[..., Any]]
    cases: tuple[str, ...] = ("packed",)
    tiers: tuple[int, ...] = ANY
    spot: Spot = field(default_factory=Spot)
    base: str = "chunk"
    verdict: str = "fail"
    stage: str | None = None
    """The first stage whose value departs, where the fault lies in one."""
    clauses: Mapping[str, Any] = field(default_factory=dict)
    """What the kernel declares about itself, clause id -> value."""
    says: str = ""
    """A word that the verdict's reason must hold."""
    relations: str = "quick"
    """`all` where it takes more than causality and isolation to see it."""
    unseen: str = ""
    """Why no tier can see it on these cases; the verdict is then `pass`."""


SHAPE = {"lengths": [70, 0, 1, 130], "k_heads": 2, "v_heads": 4, "dims": (32, 32), "state": "random"}
# Packed row of each sequence's first token in SHAPE.
STARTS = (0, 70, 70, 71)
LENGTHS = SHAPE["lengths"]

# name -> arguments of gdncheck.capture.make.make.
CASES: dict[str, dict[str, Any]] = {
    "packed": {"family": "qwen", **SHAPE},
    "fp32": {"family": "qwen", **SHAPE, "dtype": "fp32"},
    "no-decay": {"family": "no-decay", **SHAPE},
    "tiny-decay": {"family": "tiny-decay", **SHAPE},
    "minus-inf": {"family": "minus-inf", **SHAPE},
    "parallel": {"family": "parallel-keys", **SHAPE},
    "uneven": {"family": "qwen", **SHAPE, "dims": (64, 32)},
    "raw": {"family": "gaussian", **SHAPE},
    "raw-fp32": {"family": "gaussian", **SHAPE, "dtype": "fp32"},
    "alone": {"family": "qwen", **SHAPE, "lengths": [130]},
    "fresh": {"family": "qwen", **SHAPE, "state": ["random", "random", "stale", "stale"]},
    "zeros": {"family": "qwen", **SHAPE, "state": "zeros"},
    "no-state": {"family": "qwen", **SHAPE, "state": "none"},
    "65": {"family": "qwen", **SHAPE, "lengths": [65, 129]},
    "deep": {"family": "qwen", **SHAPE, "dims": (128, 32), "lengths": [130, 20]},
}


def family(values, keep):
    """Parameters of which the first `keep` run by default and the rest in the slow suite."""
    return [
        v if n < keep else pytest.param(*_as_tuple(v), marks=pytest.mark.slow) for n, v in enumerate(values)
    ]


def _as_tuple(value):
    return value if isinstance(value, tuple) else (value,)
