"""Axis repeat: the same call again, as the first call of a process, in a process of its own, on a busy GPU.

A number runs the call so often in one process; every run is judged and all must give the same bits, where the
contract promises that.
"""

from __future__ import annotations

import msgspec

from .axis import Axis, Ran, Setup, Situation, always

VALUES = ("5", "first", "fresh", "busy")


def _refuses(situation: Situation, value: str) -> str:
    return "needs a GPU, whose second stream is kept busy" if value == "busy" and not situation.on_gpu else ""


def _apply(setup: Setup, value: str) -> Setup:
    if value == "busy":
        return msgspec.structs.replace(setup, options={**setup.options, "busy": True})
    if value in ("first", "fresh"):
        return msgspec.structs.replace(setup, process=value)
    return msgspec.structs.replace(setup, runs=int(value))


def _exercised(setup: Setup, ran: Ran) -> str:
    if setup.options.get("busy"):
        launches = ran.evidence.get("busy_stream", 0)
        return f"{launches} launches on a second stream meanwhile" if launches else ""
    if setup.process != "warm":
        return (
            "the first call of a new process" if setup.process == "first" else "warm, in a process of its own"
        )
    return f"{setup.runs} runs in one process" if setup.runs > 1 else ""


def _same_bits(value: str) -> str:
    return {"first": "first-vs-warm", "fresh": "across-processes"}.get(value, "")


AXIS = Axis(
    name="repeat",
    what="runs in a process; the first call of one; a process of its own; a busy GPU",
    relation="every run right, and the same bits where the contract promises them",
    baseline=always("1"),
    values=lambda situation: ["1", *VALUES],
    refuses=_refuses,
    apply=_apply,
    exercised=_exercised,
    valid=lambda text: text in ("first", "fresh", "busy") or (text.isdecimal() and int(text) > 0),
    grammar="a number of runs, first, fresh, or busy",
    order=90,
    same_bits=_same_bits,
)
