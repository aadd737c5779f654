"""Axis memory: what lies in memory that nobody has written yet, and around what was given.

On a GPU also what the last launch left in shared memory.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .axis import Axis, Ran, Setup, Situation, always

SHARED = {"shared-nan": "nan", "shared-huge": "huge"}
VALUES = ("nan", "huge", "guard", *SHARED)


def _apply(setup: Setup, value: str) -> Setup:
    if value == "clean":
        return setup
    added: dict[str, Any] = {"guard": True} if value == "guard" else {"poison": value}
    if value in SHARED:
        added = {"shared": SHARED[value]}
    return msgspec.structs.replace(setup, options={**setup.options, **added})


def _exercised(setup: Setup, ran: Ran) -> str:
    found = []
    if setup.options.get("poison") and ran.evidence.get("poisoned_buffers"):
        found.append(
            f"{ran.evidence['poisoned_buffers']} fresh buffers filled with {setup.options['poison']}"
        )
    if setup.options.get("guard") and ran.evidence.get("guarded_buffers"):
        found.append(f"{ran.evidence['guarded_buffers']} buffers between guard bands")
    dirty = ran.evidence.get("shared_memory", {})
    if setup.options.get("shared") and dirty:
        # A compiled library's own launches are not seen: there it was filled once.
        when = f"before {dirty['launches']} launches" if dirty["launches"] else "at the call's start"
        found.append(
            f"{dirty['bytes']} bytes of shared memory on {dirty.get('multiprocessors', '?')} multiprocessors "
            f"filled with {dirty['filled_with']} {when}"
        )
    return ", ".join(found)


def _refuses(situation: Situation, value: str) -> str:
    if value not in SHARED or situation.on_gpu:
        return ""
    return "needs a GPU: Triton's interpreter has no shared memory to make dirty"


AXIS = Axis(
    name="memory",
    what="what fresh allocations and shared memory hold; guard bands round inputs and buffers",
    relation="the baseline's bits; no guard band is written",
    baseline=always("clean"),
    values=lambda situation: ["clean", *VALUES],
    refuses=_refuses,
    apply=_apply,
    exercised=_exercised,
    valid=lambda text: text in ("clean", *VALUES),
    grammar=", ".join(("clean", *VALUES)),
    order=80,
    same_bits=lambda value: "fresh-memory",
)
