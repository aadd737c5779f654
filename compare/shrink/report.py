"""A shrink on a terminal and as JSON: from what to what, what stayed, the failing and the passing line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from ...capture.case import Case
from ..jsonout import place, plain_numbers
from ..report_words import full
from ..statistics import rate_interval
from ..sweep.attempt import Attempt
from ..sweep.configuration import in_words
from .asking import Rate
from .reduce import passing_path
from .result import Shrunk, words_of

SCHEMA = 1
ENDS = {
    "smallest": "nothing smaller was found",
    "budget": "the time was used up, so it may go on; run it again with the same -o",
    "runs": "the runs were used up, so it may go on; run it again with the same -o",
    "interrupted": "interrupted; run it again with the same -o to go on",
}


def print_report(shrunk: Shrunk, console: Console) -> None:
    """Print a shrink."""
    for line in lines(shrunk):
        console.print(escape(line), highlight=False, soft_wrap=True)


def lines(shrunk: Shrunk) -> Iterator[str]:
    """The report, line by line."""
    yield f"{shrunk.kernel}: {shrunk.fault.in_words()} (signature {shrunk.signature.digest})"
    for word, what, size in (
        ("from", shrunk.start_words, shrunk.start_size), ("to  ", shrunk.words, shrunk.size)
    ):  # fmt: skip
        yield f"{word} {what}, {size.elements:,} numbers, {size.distinct:,} distinct"
    yield f"kept: {'; '.join(shrunk.accepted) or 'the start is as small as it goes'}"
    yield f"fails:  {_line(shrunk.case, shrunk.deviations, shrunk.attempt)}"
    near = shrunk.neighbour
    if near is not None:
        yield f"passes: {_line(near.case, near.deviations, near.attempt)} ({near.change})"
    else:
        yield "passes: no passing neighbour was met"
    yield rate_line(shrunk.rate, shrunk.confirmed)
    if shrunk.path is not None:
        beside = "" if near is None else f", the passing one in {passing_path(shrunk.path)}"
        yield f"written to {shrunk.path}{beside}"
    yield f"{ENDS[shrunk.stopped]} ({shrunk.tried} candidates, {shrunk.runs} runs)"
    yield f"{shrunk.attempt.verdict} in {shrunk.seconds:.1f} s: {shrunk.command or 'gdncheck shrink'}"


def _line(case: Case, deviations: dict[str, str], attempt: Attempt) -> str:
    lengths = "" if case.n_sequences == 1 else f" of lengths {','.join(map(str, case.lengths))}"
    where = "" if attempt.place is None else f", {full(attempt.place)}"
    return f"{words_of(case)}{lengths}, {in_words(deviations)}: {attempt.verdict}{where}"


def rate_line(rate: Rate, confirmed: bool) -> str:
    """How often it fails in a new process."""
    if not rate.runs:
        return "not run again in a new process"
    if not confirmed:
        return f"it did not fail in {rate.runs} runs of a new process: it depends on the calls before it"
    low, high = rate.interval
    interval = f"95 % interval {low:.3g} to {high:.3g}"
    return f"in a new process it fails in {rate.failures} of {rate.runs} runs ({interval})"


def document(shrunk: Shrunk) -> dict[str, Any]:
    """The shrink as plain data."""
    near = shrunk.neighbour
    rate = shrunk.rate
    body = {
        "schema": SCHEMA,
        "kernel": shrunk.kernel,
        "signature": shrunk.signature.digest,
        "fault": msgspec.to_builtins(shrunk.fault),
        "verdict": shrunk.attempt.verdict,
        "tier": shrunk.attempt.tier,
        "rule": shrunk.attempt.rule,
        "reason": shrunk.attempt.reason,
        "place": place(shrunk.attempt.place),
        "start": msgspec.to_builtins(shrunk.start_size),
        "smallest": {**_shape(shrunk.case), **msgspec.to_builtins(shrunk.size)},
        "deviations": shrunk.deviations,
        "case": None if shrunk.path is None else str(shrunk.path),
        "neighbour": None if near is None else {
            **_shape(near.case), "deviations": near.deviations, "change": near.change,
            "verdict": near.attempt.verdict,
            "case": None if shrunk.path is None else str(passing_path(shrunk.path)),
        },
        "confirmed": shrunk.confirmed,
        "failures": rate.failures,
        "rate_runs": rate.runs,
        "rate": rate.value if rate.runs else None,
        "interval": list(rate_interval(rate.failures, rate.runs)),
        "kept": list(shrunk.accepted),
        "tried": shrunk.tried,
        "runs": shrunk.runs,
        "stopped": shrunk.stopped,
        "seconds": shrunk.seconds,
        "command": shrunk.command,
    }  # fmt: skip
    plain = plain_numbers(body)
    assert isinstance(plain, dict)
    return plain


def _shape(case: Case) -> dict[str, Any]:
    return {
        "tokens": case.n_tokens,
        "sequences": case.n_sequences,
        "lengths": case.lengths,
        "key_heads": case["q"].shape[1],
        "value_heads": case["v"].shape[1],
        "dims": [case["q"].shape[-1], case["v"].shape[-1]],
    }


def dumps(shrunk: Shrunk) -> str:
    """One JSON document."""
    return json.dumps(document(shrunk), indent=2, allow_nan=False)
