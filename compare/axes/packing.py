"""Axis packing: which other sequences share the call.

A neighbour is another request of the same model: tokens of the case in another order, from a state of its
own. `poisoned` hands neighbours NaN in every tensor, so only the case's own sequences are judged, and they
must be as if alone.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from ...capture.case import Case
from .axis import Axis, Ran, Setup, Situation, always
from .recase import joined, neighbour, rule_only, sequences_of

VALUES = ("before", "behind", "one-token", "empty", "empty-last", "permuted", "poisoned")
# No multiple of a chunk: the neighbour's tail shares its last chunk with nobody.
NEIGHBOUR_TOKENS = 67


def _refuses(situation: Situation, value: str) -> str:
    if value == "alone":
        return ""
    if not situation.info.capabilities.varlen:
        return "the kernel takes one sequence per call"
    if situation.case.n_tokens == 0:
        return "the case has no token to make a neighbour of"
    if value == "permuted" and situation.case.n_sequences < 2:
        return "the case has one sequence, so there is no other order"
    return ""


def _apply(setup: Setup, value: str) -> Setup:
    if value == "alone":
        return setup
    case = rule_only(setup.case)
    each = [sequences_of(case, [i]) for i in range(case.n_sequences)]
    if value == "permuted":
        order = list(reversed(range(len(each))))
        own = tuple(order.index(i) for i in setup.own)
        return msgspec.structs.replace(setup, case=sequences_of(case, order), own=own)
    parts, at = _company(case, each, value, setup.seed)
    return msgspec.structs.replace(
        setup,
        case=joined(parts),
        own=tuple(at[i] for i in setup.own),
        judged="own" if value == "poisoned" else setup.judged,
    )


def _company(case: Case, each: list[Case], value: str, seed: int) -> tuple[list[Case], list[int]]:
    """The sequences of the call, and where each of the case's own is among them."""
    other = neighbour(case, NEIGHBOUR_TOKENS, seed=seed + 11)
    n = len(each)
    if value == "before":
        return [other, *each], [i + 1 for i in range(n)]
    if value == "behind":
        return [*each, other], list(range(n))
    if value == "poisoned":
        bad = _poisoned(other)
        return [bad, *each, bad], [i + 1 for i in range(n)]
    if value == "empty-last":
        return [*each, neighbour(case, 0, seed=seed)], list(range(n))
    if value == "empty":
        nobody = neighbour(case, 0, seed=seed)
        parts = [nobody, *(p for one in each for p in (one, nobody))]
        return parts, [2 * i + 1 for i in range(n)]
    assert value == "one-token", value
    short = [neighbour(case, 1, seed=seed + 13 + i) for i in range(n + 2)]
    parts = [short[0], short[1], *(p for i, one in enumerate(each) for p in (one, short[i + 2]))]
    return parts, [2 * i + 2 for i in range(n)]


def _poisoned(case: Case) -> Case:
    """NaN in all that a sequence brings along."""
    changed: dict[str, Tensor | None] = {
        name: torch.full_like(case[name], torch.nan)
        for name in ("q", "k", "v", "g", "beta", "initial_state")
        if case.get(name) is not None
    }
    return case.with_tensors(**changed)


def _exercised(setup: Setup, ran: Ran) -> str:
    others = setup.case.n_sequences - len(setup.own)
    if others:
        return f"{others} other sequence(s) in the same call"
    return "sequences in another order" if list(setup.own) != sorted(setup.own) else ""


AXIS = Axis(
    name="packing",
    what="which sequences share the call",
    relation="the truth of the packed case; beside a poisoned neighbour, that of the case alone",
    baseline=always("alone"),
    values=lambda situation: ["alone", *VALUES],
    refuses=_refuses,
    apply=_apply,
    exercised=_exercised,
    valid=lambda text: text in ("alone", *VALUES),
    grammar=", ".join(("alone", *VALUES)),
    order=50,
    same_bits=lambda value: "batch-invariance",
)
