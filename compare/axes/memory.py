"""Axis memory: what lies in memory that nobody has written yet, and around what was given."""

from __future__ import annotations

import msgspec

from .axis import Axis, Ran, Setup, always, never_refuses

VALUES = ("nan", "huge", "guard")


def _apply(setup: Setup, value: str) -> Setup:
    if value == "clean":
        return setup
    added = {"guard": True} if value == "guard" else {"poison": value}
    return msgspec.structs.replace(setup, options={**setup.options, **added})


def _exercised(setup: Setup, ran: Ran) -> str:
    found = []
    if setup.options.get("poison") and ran.evidence.get("poisoned_buffers"):
        found.append(
            f"{ran.evidence['poisoned_buffers']} fresh buffers filled with {setup.options['poison']}"
        )
    if setup.options.get("guard") and ran.evidence.get("guarded_buffers"):
        found.append(f"{ran.evidence['guarded_buffers']} buffers between guard bands")
    return ", ".join(found)


AXIS = Axis(
    name="memory",
    what="what fresh allocations hold; guard bands round inputs and buffers",
    relation="the baseline's bits; no guard band is written",
    baseline=always("clean"),
    values=lambda situation: ["clean", *VALUES],
    refuses=never_refuses,
    apply=_apply,
    exercised=_exercised,
    valid=lambda text: text in ("clean", *VALUES),
    grammar=", ".join(("clean", *VALUES)),
    order=80,
    same_bits=lambda value: "fresh-memory",
)
