"""Axis heads: the share of the heads that one rank of a tensor-parallel group works on."""

from __future__ import annotations

import re

import msgspec

from .axis import Axis, Setup, Situation, always
from .rank import heads_of_rank, not_shared

VALUES = ("tp2", "tp4", "tp8")
WORD = re.compile(r"tp([2-9]|[1-9]\d+)(?:\.(\d+))?")


def _share(value: str) -> tuple[int, int]:
    """(ranks, rank) of `tp4` or `tp4.1`; the last rank where none is named, whose offsets are largest."""
    match = WORD.fullmatch(value)
    assert match is not None, value
    ranks = int(match[1])
    return ranks, int(match[2]) if match[2] else ranks - 1


def _valid(text: str) -> bool:
    return text == "all" or (WORD.fullmatch(text) is not None and _share(text)[1] < _share(text)[0])


def _refuses(situation: Situation, value: str) -> str:
    if value == "all":
        return ""
    return not_shared(situation.case["q"].shape[1], situation.case["v"].shape[1], _share(value)[0])


def _apply(setup: Setup, value: str) -> Setup:
    if value == "all":
        return setup
    return msgspec.structs.replace(setup, case=heads_of_rank(setup.case, *_share(value)))


AXIS = Axis(
    name="heads",
    what="the heads of one rank at tensor parallelism 2, 4, 8",
    relation="the truth of those heads alone",
    baseline=always("all"),
    values=lambda situation: ["all", *VALUES],
    refuses=_refuses,
    apply=_apply,
    exercised=lambda setup, ran: f"{setup.case['v'].shape[1]} value heads in the call",
    valid=_valid,
    grammar="all, tp2, tp4, tp8, or tp4.1 for rank 1 of 4",
    order=10,
)
