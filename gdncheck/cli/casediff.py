"""`gdncheck diff A B`: how two case files differ. The library twin is compare.casediff.casediff."""

from __future__ import annotations

import time
from typing import Any

import click

SCHEMA = 1


def print_difference(first: str, second: str, *, as_json: bool) -> int:
    """Print how two case files differ; returns the exit status: 0 the same, 1 not."""
    from gdncheck.capture.casefile import read_case
    from gdncheck.compare.casediff import casediff

    started = time.monotonic()
    difference = casediff(read_case(first), read_case(second))
    if as_json:
        import json

        import msgspec

        from gdncheck.compare.jsonout import plain_numbers

        document = plain_numbers({"schema": SCHEMA, **msgspec.to_builtins(difference)})
        click.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        for line in lines_of(difference):
            click.echo(line)
        verdict = "same" if difference.same else "different"
        seconds = time.monotonic() - started
        names = f"{click.format_filename(first)} {click.format_filename(second)}"
        click.echo(f"{verdict} in {seconds:.1f} s: gdncheck diff {names}")
    return 0 if difference.same else 1


def lines_of(difference: Any) -> list[str]:
    """One line per tensor and per header key that differs."""
    lines = [f"A {difference.first}", f"B {difference.second}"]
    for tensor in difference.tensors:
        lines.append(f"  {tensor.name:22} {_words(tensor)}")
    for key, (a, b) in difference.header.items():
        lines.append(f"  {key:22} {a!r} in A, {b!r} in B")
    return lines


def _words(tensor: Any) -> str:
    if tensor.status == "only-in-first":
        return "only in A"
    if tensor.status == "only-in-second":
        return "only in B"
    if tensor.status == "shape":
        return f"shape {tensor.shapes[0]} in A, {tensor.shapes[1]} in B"
    if tensor.status == "equal":
        return "equal"
    dtype = (
        "" if tensor.dtypes[0] == tensor.dtypes[1] else f"{tensor.dtypes[0]} in A, {tensor.dtypes[1]} in B"
    )
    if tensor.status == "dtype":
        return f"equal numbers, {dtype}"
    place = f"index {tensor.index}"
    if tensor.token is not None:
        place = f"token {tensor.token} of sequence {tensor.sequence} ({place})"
    largest = "" if tensor.max_abs is None else f", by at most {tensor.max_abs:.3g}"
    first, second = tensor.values
    words = (
        f"{tensor.n_different} entries differ{largest}; first at {place}: {first:.6g} in A, {second:.6g} in B"
    )
    return f"{words}; {dtype}" if dtype else words
