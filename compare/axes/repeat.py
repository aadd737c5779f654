"""Axis repeat: the same call again, as the first call of a process, in a process of its own.

A number runs the call so often in one process; every run is judged and all must give the same bits, where the
contract promises that.
"""

from __future__ import annotations

import msgspec

from .axis import Axis, Ran, Setup, always, never_refuses

VALUES = ("5", "first", "fresh")


def _apply(setup: Setup, value: str) -> Setup:
    if value in ("first", "fresh"):
        return msgspec.structs.replace(setup, process=value)
    return msgspec.structs.replace(setup, runs=int(value))


def _exercised(setup: Setup, ran: Ran) -> str:
    if setup.process != "warm":
        return (
            "the first call of a new process" if setup.process == "first" else "warm, in a process of its own"
        )
    return f"{setup.runs} runs in one process" if setup.runs > 1 else ""


def _same_bits(value: str) -> str:
    return {"first": "first-vs-warm", "fresh": "across-processes"}.get(value, "")


AXIS = Axis(
    name="repeat",
    what="runs in a process; the first call of one; a process of its own",
    relation="every run right, and the same bits where the contract promises them",
    baseline=always("1"),
    values=lambda situation: ["1", *VALUES],
    refuses=never_refuses,
    apply=_apply,
    exercised=_exercised,
    valid=lambda text: text in ("first", "fresh") or (text.isdecimal() and int(text) > 0),
    grammar="a number of runs, first, or fresh",
    order=90,
    same_bits=_same_bits,
)
