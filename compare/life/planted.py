"""Planted bookkeeping faults: sound bookkeepers but for one thing that engines have got wrong.

The idea: a check of bookkeeping is worth what it finds, so each fault that people have reported (rows of
public-faults.md in brackets) is a class of a few lines, which `gdncheck life --bookkeeper planted:NAME` runs.
"""

from __future__ import annotations

import msgspec

from .bookkeeping import Bookkeeper, Owned, PaddedPlan, Plan, Request, RowPlan, RowRequest
from .steps import Padding


class StaleOneToken(Bookkeeper):
    """A fresh sequence whose first chunk is one token is taken for a decode, which has a state (8, 10)."""

    def row(self, asked: RowRequest, clears: list[int]) -> RowPlan:
        plan = super().row(asked, clears)
        return msgspec.structs.replace(plan, fresh=plan.fresh and asked.tokens > 1)


class ConvInPlace(Bookkeeper):
    """The conv's state is written to the slot it was read from although the state moves on (8, 27)."""

    def row(self, asked: RowRequest, clears: list[int]) -> RowPlan:
        plan = super().row(asked, clears)
        return (
            plan if asked.kind == "verify" else msgspec.structs.replace(plan, conv_writes=(plan.conv_read,))
        )


class AcceptedOffByOne(Bookkeeper):
    """The column after the one of the last accepted token is read next (26)."""

    def accept(self, sequence: int, accepted: int) -> None:
        last = self.verified[sequence] - 1
        super().accept(sequence, accepted)
        self.owned[sequence].current = min(accepted + 1, last)


class NeighboursCheckpoint(Bookkeeper):
    """A resumed sequence is given the checkpoint of the next sequence that has one (27)."""

    def source(self, own: Owned) -> int:
        slot = super().source(own)
        if slot != own.checkpoint:
            return slot
        others = [o.checkpoint for o in self.owned.values() if o is not own and o.checkpoint is not None]
        return others[0] if others else slot


class PaddedRowWrites(Bookkeeper):
    """Padded rows keep the index that the last call left behind, and run a token (28)."""

    def padded_row(self, place: int, padding: Padding) -> PaddedPlan:
        plan = super().padded_row(place, padding)
        left = self.buffer[place] if place < len(self.buffer) else plan.slot
        return msgspec.structs.replace(plan, slot=left, tokens=1)


class PositionSkipped(Bookkeeper):
    """After a resume with its state kept a sequence goes on one token too late (29)."""

    def resume(self, sequence: int, source: str) -> None:
        super().resume(sequence, source)
        self.owned[sequence].position += source == "kept" and self.owned[sequence].position > 0


class NotCleared(Bookkeeper):
    """Slots are cleared when they are handed out first, and never again (8)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.clears = True
        self.clean: set[int] = set(range(self.slots))

    def plan(self, request: Request) -> Plan:
        plan = super().plan(request)
        kept = tuple(slot for slot in plan.clears if slot in self.clean)
        used = {slot for row in plan.rows for slot in (row.read, *row.writes, *row.conv_writes)}
        self.clean -= used
        return msgspec.structs.replace(plan, clears=kept)


PLANTED: dict[str, type[Bookkeeper]] = {
    "stale-one-token": StaleOneToken,
    "conv-in-place": ConvInPlace,
    "accepted-off-by-one": AcceptedOffByOne,
    "neighbours-checkpoint": NeighboursCheckpoint,
    "padded-row-writes": PaddedRowWrites,
    "position-skipped": PositionSkipped,
    "not-cleared": NotCleared,
}
