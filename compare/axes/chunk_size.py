"""Axis chunk_size: the tokens that the kernel works on at a time, where it lets the caller choose."""

from __future__ import annotations

import msgspec

from .axis import Axis, Ran, Setup, Situation

NO_CHUNKS = "none"


def _own(situation: Situation) -> str:
    return NO_CHUNKS if situation.chunk_size is None else str(situation.chunk_size)


def _values(situation: Situation) -> list[str]:
    return [str(size) for size in sorted(situation.info.capabilities.chunk_sizes)]


def _refuses(situation: Situation, value: str) -> str:
    sizes = situation.info.capabilities.chunk_sizes
    if value == _own(situation):
        return ""
    if situation.chunk_size is None:
        return "the kernel has no chunks"
    if not sizes:
        return f"the kernel has a fixed chunk of {situation.chunk_size}"
    if value == NO_CHUNKS or int(value) not in sizes:
        return f"the kernel takes {', '.join(map(str, sorted(sizes)))}"
    return ""


def _apply(setup: Setup, value: str) -> Setup:
    if value == NO_CHUNKS or setup.chunk_size == int(value):
        return setup
    size = int(value)
    return msgspec.structs.replace(setup, chunk_size=size, options={**setup.options, "chunk_size": size})


def _exercised(setup: Setup, ran: Ran) -> str:
    asked = setup.options.get("chunk_size")
    return "" if asked is None else f"chunk_size={asked} passed to {ran.calls} call(s)"


AXIS = Axis(
    name="chunk_size",
    what="tokens per chunk, where the kernel or its stages allow",
    relation="the truth of the same case, tier 3 of the same chunk size",
    baseline=_own,
    values=_values,
    refuses=_refuses,
    apply=_apply,
    exercised=_exercised,
    valid=lambda text: text == NO_CHUNKS or text.isdecimal(),
    grammar="a number of tokens, e.g. 32",
    order=60,
    work_around=True,
)
