"""What a capture will write, worked out and told before anything is written.

The idea: the same function serves the parent, which knows the ids of a JSON file at once, and the child,
which knows those of a text only after tokenizing; both refuse a disk that is too small.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from .checkpoint import ModelShape, What, expected_bytes
from .errors import BadInput, CannotRun
from .records import Plan
from .tokens import call_lengths


def make_plan(
    shape: ModelShape, n_tokens: int, layers: list[int], what: What,
    *, split: int | list[int] | None, decode: int, dtype: str | None = None,
) -> Plan:  # fmt: skip
    """Calls and bytes of a capture. dtype: of the loaded model, None or `auto` for the checkpoint's."""
    if decode < 0:
        raise BadInput(f"--decode {decode}: give the number of tokens to generate, 0 or more")
    lengths = call_lengths(n_tokens, split)
    one_layer = expected_bytes(shape, lengths + [1] * decode, what, None if dtype == "auto" else dtype)
    return Plan(
        n_tokens=n_tokens,
        lengths=lengths,
        layers=layers,
        what=what,
        decode=decode,
        bytes=one_layer * len(layers),
    )


def check_room(plan: Plan, out: Path) -> None:
    """Raise CannotRun where the disk under `out` (or its nearest existing parent) has too little room."""
    place = out
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < plan.bytes:
        remedy = "take fewer layers" if plan.what == "rule" else "take fewer layers or --what rule"
        raise CannotRun(
            f"{out}: the capture needs {size(plan.bytes)}, {size(free)} are free; {remedy}, or another --out"
        )


def describe(plan: Plan, out: Path) -> str:
    """One line: `200 tokens in 2 calls, 1 layer, core: 2 files, 1.3 MB in captures`."""
    n_calls = len(plan.lengths) + plan.decode
    files = _count(n_calls * len(plan.layers), "file")
    generated = f" and {plan.decode} decode steps" if plan.decode else ""
    return (
        f"{plan.n_tokens} tokens in {_count(len(plan.lengths), 'call')}{generated}, "
        f"{_count(len(plan.layers), 'layer')}, {plan.what}: {files}, {size(plan.bytes)} in {out}"
    )


def size(n_bytes: int) -> str:
    """Bytes in words: 512 B, 1.3 MB, 0.62 GB (powers of ten, as disks are sold)."""
    for unit, factor, digits in (("GB", 10**9, 2), ("MB", 10**6, 1), ("kB", 10**3, 1)):
        if n_bytes >= 0.1 * factor and (unit != "kB" or n_bytes >= factor):
            return f"{n_bytes / factor:.{digits}f} {unit}"
    return f"{n_bytes} B"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
