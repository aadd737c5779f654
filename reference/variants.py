"""Honest variants: other sound ways to run the same algorithm in the same precision.

The idea: tier 3 divides a kernel's error by what the algorithm itself costs. One emulation gives one
draw of that cost; a kernel adds in another order, and so flips other roundings. The variants are further
draws: operands off by a float32 ulp, dot products summed in another order. What is true of them
all is true of a sound kernel. They round to nearest as kernels do; stochastic rounding is never used
(its error is sqrt(2) times larger and would excuse a bad kernel).

A variant is data; `emulation_arithmetic` executes it. Another chunk size is a sound kernel too, but
another algorithm with another error: a class of its own, left out unless asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Order = Literal["natural", "reversed", "permuted"]
Kind = Literal["plain", "ulp", "order", "both", "chunk-size"]


@dataclass(frozen=True)
class Variant:
    """One sound way to run the algorithm."""

    name: str
    kind: Kind = "plain"
    """`plain`: as written; `ulp`: perturbed operands; `order`: sums in another order."""
    seed: int = 0
    """Of the permutations and the perturbation; on one device the result is a function of it."""
    perturb: bool = False
    """Move some operands (inputs, and values about to be cast) by one unit of float32's last place."""
    order: Order = "natural"
    """Order in which the products of a dot are summed, over K as well as over tokens."""
    block: int | None = None
    """Sum dots in blocks of so many products, then the blocks; None: as the library does."""
    chunk_size: int | None = None
    """Run in chunks of this size instead of the kernel's; None: the kernel's."""


PLAIN = Variant("plain")

# What the eight do, in the order in which `honest_variants` hands them out: the most different first, so
# that a short list still spans the kinds.
_RECIPES: tuple[tuple[str, Kind, bool, Order, int | None], ...] = (
    ("permuted sums", "order", False, "permuted", None),
    ("ulp", "ulp", True, "natural", None),
    ("sums in blocks of 32", "order", False, "natural", 32),
    ("ulp, reversed sums", "both", True, "reversed", None),
    ("sums in blocks of 16", "order", False, "natural", 16),
    ("ulp, permuted sums in blocks of 64", "both", True, "permuted", 64),
    ("reversed sums", "order", False, "reversed", None),
    ("ulp, permuted sums in blocks of 16", "both", True, "permuted", 16),
)


def honest_variants(n: int = 8, seed: int = 0, chunk_sizes: tuple[int, ...] = ()) -> list[Variant]:
    """n seeded variants of the kinds `ulp`, `order` and `both`, then one per entry of chunk_sizes.

    The plain emulation is not among them. The first eight differ in kind; beyond that the recipes are
    drawn again with other seeds (only those that depend on a seed). Raises ValueError for a negative n.
    """
    if n < 0:
        raise ValueError(f"honest_variants needs n >= 0, not {n}")
    seeded = [r for r in _RECIPES if r[2] or r[3] == "permuted"]
    variants = []
    for i in range(n):
        name, kind, perturb, order, block = _RECIPES[i] if i < len(_RECIPES) else seeded[i % len(seeded)]
        own = seed * 1_000_003 + i + 1
        variants.append(Variant(f"{name} #{i + 1}", kind, own, perturb, order, block))
    for size in chunk_sizes:
        variants.append(Variant(f"chunk size {size}", "chunk-size", seed, chunk_size=size))
    return variants
