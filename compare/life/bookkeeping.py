"""The bookkeeping under test: who owns which slot, what is read and where it is written.

The idea: an engine's scheduler says which tokens run next; a bookkeeper turns that into slot numbers. It is
the part that public faults are in (a recycled slot taken for a sequence's own, a column of a rejected draft,
a padded row with an old index), so it is a small class that anyone can write for their own engine and hand
over by import path. `Bookkeeper` below is the interface and a sound one; `planted` has unsound ones.

What a bookkeeper may assume: steps make sense (`legal`), and slots 1 to slots - 1 of both pools are its to
give out. Slot 0 belongs to nobody: padded rows may point at it and scribble there.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, Protocol

import msgspec

from ...capture.errors import BadInput
from .steps import Padding


class RowRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a call, as the scheduler asks for it."""

    sequence: int
    kind: Literal["prefill", "decode", "verify"]
    tokens: int
    """Tokens to run: of a verify, one more than the draft."""
    keep: bool = False
    """Leave the state before this call behind as the sequence's checkpoint (in place of an older one)."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One call."""

    rows: tuple[RowRequest, ...]
    padded: int = 0
    padding: Padding = "-1"


class RowPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where one row reads and writes. State and conv have a pool each, with slots of the same number."""

    sequence: int
    start: int
    """Position of the first token that is fed: tokens seen before."""
    fresh: bool
    """Start from zero whatever the slot holds (has_initial_state false)."""
    read: int
    """Slot of the state before the call."""
    writes: tuple[int, ...]
    """Slot of the state after the call; of a verify, a slot for the state after each of its tokens."""
    conv_read: int
    conv_writes: tuple[int, ...]


class PaddedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One padded row: the index that the kernel is given, and how many tokens (1, or 0)."""

    slot: int
    tokens: int = 1


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One call, planned: clears first, then copies, then the kernel."""

    rows: tuple[RowPlan, ...]
    padded: tuple[PaddedPlan, ...] = ()
    clears: tuple[int, ...] = ()
    """Slots that are filled with zeros, in both pools."""
    copies: tuple[tuple[int, int], ...] = ()
    """(from, to): slots that are copied, in both pools."""


class Bookkeeping(Protocol):
    """The interface: a class whose instances have these methods, made with (slots, draft)."""

    def arrive(self, sequence: int) -> None:
        """A sequence is admitted."""

    def preempt(self, sequence: int, state: str) -> None:
        """It stops; `state` is kept or dropped (a checkpoint stays in either case)."""

    def resume(self, sequence: int, source: str) -> None:
        """It comes back from `kept`, `checkpoint` or `zero`."""

    def finish(self, sequence: int) -> None:
        """It ends."""

    def plan(self, request: Request) -> Plan:
        """Slots for a call, row by row in the order of the request."""

    def accept(self, sequence: int, accepted: int) -> None:
        """After a verify: of the draft's tokens so many were right (the first token always is)."""


@dataclass
class Owned:
    """What a sequence owns."""

    columns: list[int]
    """1 + draft slots; the state is in the one numbered `current`."""
    current: int = 0
    position: int = 0
    checkpoint: int | None = None
    """Its slot."""
    checkpoint_position: int = 0
    written: bool = False
    """Some call has written its state, or it was cleared."""
    cleared: bool = False


@dataclass
class Bookkeeper:
    """A sound bookkeeper, in the manner of vLLM (has_initial_state tells fresh sequences) or, with
    `clears`, of SGLang (a slot is cleared when it is handed out, and every sequence has a state)."""

    slots: int
    draft: int
    clears: bool = False
    owned: dict[int, Owned] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    buffer: list[int] = field(default_factory=list)
    """The indices of the last call's rows: what a replayed graph still holds."""

    def __post_init__(self) -> None:
        self.free = list(range(self.slots - 1, 0, -1))
        self.verified: dict[int, int] = {}
        """Tokens of each sequence's last verify, until the accepted ones are known."""

    def take(self) -> int:
        """A free slot; the one given back last comes first, so that slots are handed on at once."""
        return self.free.pop()

    def give(self, slots: list[int]) -> None:
        self.free += slots

    def arrive(self, sequence: int) -> None:
        self.owned[sequence] = Owned([self.take() for _ in range(1 + self.draft)])

    def preempt(self, sequence: int, state: str) -> None:
        if state == "dropped":
            self.give(self.owned[sequence].columns[::-1])
            self.owned[sequence].columns = []

    def resume(self, sequence: int, source: str) -> None:
        own = self.owned[sequence]
        if source == "kept":
            return
        own.columns, own.current = [self.take() for _ in range(1 + self.draft)], 0
        own.written = own.cleared = False
        if source == "zero":
            self.drop_checkpoint(own)
            own.position = 0
            return
        own.position = own.checkpoint_position

    def finish(self, sequence: int) -> None:
        own = self.owned.pop(sequence)
        self.drop_checkpoint(own)
        self.give(own.columns[::-1])

    def drop_checkpoint(self, own: Owned) -> None:
        if own.checkpoint is not None:
            self.give([own.checkpoint])
            own.checkpoint = None

    def plan(self, request: Request) -> Plan:
        clears: list[int] = []
        rows = tuple(self.row(asked, clears) for asked in request.rows)
        padded = tuple(self.padded_row(len(rows) + i, request.padding) for i in range(request.padded))
        self.buffer[: len(rows)] = [row.writes[-1] for row in rows]
        return Plan(rows=rows, padded=padded, clears=tuple(clears))

    def row(self, asked: RowRequest, clears: list[int]) -> RowPlan:
        """Plan one row, and note what the sequence has then."""
        own = self.owned[asked.sequence]
        start, read = own.position, self.source(own)
        fresh = not own.written and own.position == 0
        if fresh and self.clears:
            clears.append(read)
            fresh = False
        if asked.kind == "verify":
            writes = tuple(own.columns[: asked.tokens])
            self.verified[asked.sequence] = asked.tokens
        else:
            writes = (self.target(own, asked.keep),)
            own.current, own.position = 0, own.position + asked.tokens
        own.written = True
        return RowPlan(
            sequence=asked.sequence, start=start, fresh=fresh, read=read, writes=writes,
            conv_read=read, conv_writes=writes,
        )  # fmt: skip

    def source(self, own: Owned) -> int:
        """The slot that holds a sequence's state: its column, or its checkpoint right after a resume."""
        if not own.written and own.position > 0 and own.checkpoint is not None:
            return own.checkpoint
        return own.columns[own.current]

    def target(self, own: Owned, keep: bool) -> int:
        """The slot that the state after the call goes to; with `keep` the one before stays behind."""
        if keep and own.written:
            left = own.columns[own.current]
            self.drop_checkpoint(own)
            own.checkpoint, own.checkpoint_position = left, own.position
            own.columns[own.current] = own.columns[0]
            own.columns[0] = self.take()
        return own.columns[0]

    def padded_row(self, place: int, padding: Padding) -> PaddedPlan:
        """A row of nobody."""
        if padding == "stale" and place < len(self.buffer):
            return PaddedPlan(slot=self.buffer[place], tokens=0)
        return PaddedPlan(slot=0 if padding == "0" else -1)

    def accept(self, sequence: int, accepted: int) -> None:
        own = self.owned[sequence]
        own.current, own.position = accepted, own.position + accepted + 1
        del self.verified[sequence]


def load_bookkeeper(name: str) -> Any:
    """A class by import path `package.module:Class`, found as kernels are, or here; `sound`, `sound-clears`.

    Raises BadInput where it cannot be loaded or lacks a method.
    """
    if name in ("sound", "sound-clears"):
        return lambda slots, draft: Bookkeeper(slots, draft, clears=name == "sound-clears")
    module, colon, attribute = name.partition(":")
    if not colon:
        raise BadInput(f"bookkeeper {name}: give sound, sound-clears or package.module:Class")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"bookkeeper {name}: {error}; run where it lies, or set PYTHONPATH") from error
    missing = [
        m for m in ("arrive", "preempt", "resume", "finish", "plan", "accept") if not hasattr(found, m)
    ]
    if missing:
        raise BadInput(f"bookkeeper {name} has no {', '.join(missing)}; see docs/life.md for the interface")
    return found
