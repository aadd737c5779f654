"""Axis state: what a sequence starts from, and what lies around it in the pool.

`none`, `zeros` and `random` change the case; the others put the case's own state into a simulated pool: a
slot that another tenant left behind with has_initial_state false, a pool that holds NaN or 1e30 wherever
nobody owns it, slots in another order, a padded row with index -1.
"""

from __future__ import annotations

import re

import msgspec
import torch

from .axis import Axis, Ran, Setup, Situation, SlotPlan, always
from .recase import rule_only, starts_from_state, state_like

POOLS = {
    "stale": SlotPlan(fill="tenant"),
    "stale-nan": SlotPlan(fill="nan"),
    "nan-pool": SlotPlan(fill="nan", reversed=True),
    "huge-pool": SlotPlan(fill="huge", reversed=True),
    "slot-order": SlotPlan(fill="tenant", reversed=True),
    "padding": SlotPlan(fill="tenant", padding=1),
}
VALUES = ("none", "zeros", "random", *POOLS)
SCALED = re.compile(r"random-([0-9.]+(?:e[+-]?\d+)?)")
FRESH = ("stale", "stale-nan")


def _refuses(situation: Situation, value: str) -> str:
    if value == "none" and not bool(starts_from_state(situation.case).any()):
        return "as captured: no sequence of the case starts from a state"
    return ""


def _apply(setup: Setup, value: str) -> Setup:
    if value == "captured":
        return setup
    case = rule_only(setup.case)
    n, state = case.n_sequences, case.get("initial_state")
    dtype = torch.float32 if state is None else state.dtype
    if value == "none" or value in FRESH:
        changed = case.with_tensors(initial_state=None, has_initial_state=None)
        return msgspec.structs.replace(setup, case=changed, slots=POOLS.get(value, setup.slots))
    if value in POOLS:
        return msgspec.structs.replace(setup, slots=POOLS[value])
    if value == "zeros":
        given = torch.zeros_like(state_like(case, n, seed=setup.seed), dtype=dtype)
    else:
        match = SCALED.fullmatch(value)
        size = float(match[1]) if match else None
        given = state_like(case, n, seed=setup.seed + 17, size=size).to(dtype)
    changed = case.with_tensors(initial_state=given, has_initial_state=None)
    return msgspec.structs.replace(setup, case=changed)


def _exercised(setup: Setup, ran: Ran) -> str:
    if setup.slots is None:
        n = int(starts_from_state(setup.case).sum())
        return f"{n} of {setup.case.n_sequences} sequences start from a state"
    counted = ran.evidence.get("simulated_pool")
    return "" if not counted else str(counted)


def _valid(text: str) -> bool:
    return text in ("captured", *VALUES) or bool(SCALED.fullmatch(text))


AXIS = Axis(
    name="state",
    what="the state that a sequence starts from, and what the pool holds around it",
    relation="the truth of the case from that state; other slots keep their bits",
    baseline=always("captured"),
    values=lambda situation: ["captured", *VALUES],
    refuses=_refuses,
    apply=_apply,
    exercised=_exercised,
    valid=_valid,
    grammar=", ".join(("captured", *VALUES, "random-SIZE")),
    order=40,
    same_bits=lambda value: "slot-permutation" if value == "slot-order" else "",
)
