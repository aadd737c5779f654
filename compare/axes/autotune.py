"""Axis autotune: each configuration of each Triton kernel that the call launches, pinned in turn.

The others keep what the baseline gives them. What there is to pin is told by the call itself (its evidence
lists the tuners that ran), or declared in `gdncheck_capabilities["pins"]`; a pin is written
`kernel:BK=64+num_warps=4`. Through the interpreter warps and stages mean nothing, so each blocking is tried
once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from .axis import Axis, Ran, Setup, Situation, always

TUNER = "tuner"
# The first configuration that the device can hold, untimed; and what the tuner picks when it is asked again.
TUNING = {"tune-never": "never", "tune-fresh": "fresh"}
WORD = re.compile(r"(?P<kernel>[A-Za-z_*][\w.]*):(?P<pins>\w+=\w+(?:\+\w+=\w+)*)")
SCHEDULING = ("num_warps", "num_stages")


def pins_of(value: str) -> dict[str, dict[str, Any]]:
    """{kernel: {parameter: number}} of a pin's word."""
    match = WORD.fullmatch(value)
    assert match is not None, value
    pairs = (pair.split("=") for pair in match["pins"].split("+"))
    return {match["kernel"]: {name: _number(text) for name, text in pairs}}


def _number(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.isdecimal() else text


def word_of(kernel: str, pin: dict[str, Any]) -> str:
    """The word of a pin."""
    return f"{kernel}:{'+'.join(f'{name}={number}' for name, number in pin.items())}"


def _values(situation: Situation) -> list[str]:
    declared = [pin for pin in situation.info.capabilities.pins if WORD.fullmatch(pin)]
    words = [TUNER, *declared]
    for tuner in situation.evidence.get("tuners", ()):
        pins: list[dict[str, Any]] = tuner["configurations"]
        if not situation.on_gpu:  # a tuner that ran there ran in the interpreter
            pins = blockings(pins)
        if len(pins) > 1:
            words += [word_of(tuner["kernel"], pin) for pin in pins]
    if situation.on_gpu and len(words) > 1 + len(declared):
        words += list(TUNING)
    return list(dict.fromkeys(words))


def blockings(pins: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The distinct block sizes; a kernel that only tunes warps and stages has none to sweep."""
    found: list[dict[str, Any]] = []
    for pin in pins:
        blocks = {name: n for name, n in pin.items() if name not in SCHEDULING and n is not None}
        if blocks and blocks not in found:
            found.append(blocks)
    return found


def _refuses(situation: Situation, value: str) -> str:
    if value == TUNER or value in _values(situation):
        return ""
    kernels = sorted({str(t["kernel"]) for t in situation.evidence.get("tuners", ())})
    if not kernels and not situation.info.capabilities.pins:
        return "the call launches no autotuned kernel that can be pinned"
    return ""


def _apply(setup: Setup, value: str) -> Setup:
    if value == TUNER:
        return setup
    if value in TUNING:
        return msgspec.structs.replace(setup, options={**setup.options, "tune": TUNING[value]})
    pins = {**setup.options.get("pins", {}), **pins_of(value)}
    return msgspec.structs.replace(setup, options={**setup.options, "pins": pins})


def _exercised(setup: Setup, ran: Ran) -> str:
    asked = setup.options.get("pins", {})
    if setup.options.get("tune") and ran.evidence.get("launched"):
        return "; ".join(f"{n}({pick})" for n, pick in ran.evidence["launched"].items())
    if not asked or ran.evidence.get("pins_unused"):
        return ""
    launched = {**ran.evidence.get("launched", {}), **ran.evidence.get("pinned", {})}
    missing = [name for name in asked if name not in launched]
    return "" if missing else "launched " + "; ".join(f"{n}({launched[n]})" for n in asked)


AXIS = Axis(
    name="autotune",
    what="the configuration of each autotuned Triton kernel that the call launches",
    relation="the truth of the same case, tier 3",
    baseline=always(TUNER),
    values=_values,
    refuses=_refuses,
    apply=_apply,
    exercised=_exercised,
    valid=lambda text: text in (TUNER, *TUNING) or bool(WORD.fullmatch(text)),
    grammar="tuner, tune-never, tune-fresh, or kernel:BK=64+num_warps=4",
    order=64,
    work_around=True,
)
