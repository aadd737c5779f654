"""Delta debugging: the smallest part of a set that still fails (Zeller and Hildebrandt, 2002).

The idea: try halves, then complements, then finer parts, and go on from whatever still fails. The result is
1-minimal: taking any one element away makes the failure go. What failing means is the caller's function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def ddmin(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """A 1-minimal part of `items`, in their order. `fails(list(items))` must hold; it is not asked again.

    The empty part is tried first: what fails without any element needs none.
    """
    kept = list(items)
    if not kept or fails([]):
        return []
    parts = 2
    while len(kept) >= 2:
        pieces = _split(kept, parts)
        smaller = next((p for p in pieces if fails(p)), None)
        if smaller is not None:
            kept, parts = smaller, 2
            continue
        if parts > 2 or len(kept) == 2:
            rests = [[x for other in pieces if other is not piece for x in other] for piece in pieces]
            # With two elements the rests are the pieces themselves, which have just been tried.
            smaller = next((r for r in rests if fails(r)), None) if len(kept) > 2 else None
            if smaller is not None:
                kept, parts = smaller, max(parts - 1, 2)
                continue
        if parts >= len(kept):
            break
        parts = min(len(kept), 2 * parts)
    return kept


def _split(items: list[T], parts: int) -> list[list[T]]:
    """Contiguous pieces of nearly equal size, none empty."""
    edges = [round(i * len(items) / parts) for i in range(parts + 1)]
    return [items[a:b] for a, b in zip(edges, edges[1:], strict=False) if b > a]  # noqa: RUF007


def smallest_failing(
    fails: Callable[[int], bool], longest: int, *, guess: int | None = None, tries: int = 16
) -> tuple[int, bool]:
    """(smallest n found for which `fails` holds, whether n - 1 was seen not to fail), by bisection.

    `longest` fails. guess: tried first. Failing must be monotone for the answer to be the smallest of all;
    what is returned has failed in any case.
    """
    high, low, left = longest, 0, tries
    if guess is not None and 0 < guess < longest:
        left -= 1
        if fails(guess):
            high = guess
        else:
            low = guess
    while high - low > 1 and left > 0:
        middle = (high + low) // 2
        left -= 1
        if fails(middle):
            high = middle
        else:
            low = middle
    return high, high - low == 1
