"""The ledger: what every slot of a pool holds, who wrote it and when, and its content as a hash.

The idea (issue 6): three rules make a bookkeeping sound, whatever the kernel computes.
- read = own last write: a row reads the slot that its sequence wrote last, and the slot still has those bits;
- position = tokens seen: the state in the slot is that after exactly the tokens that the sequence has seen,
  none of them a rejected guess;
- a slot that no row of the call owns keeps its bits.
Each breach is one line that says who read or wrote what, and who wrote it before: the explanation of a
failure. What the kernel made of it is judged elsewhere (`judging`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor


@dataclass
class Entry:
    """What one slot holds."""

    sequence: int | None = None
    """Whose state; None: nobody's (never written, or cleared)."""
    position: int = 0
    """Tokens of that sequence which the state has seen."""
    step: int | None = None
    """Step that wrote it; None: no step did, and it is zero as pools are when an engine starts."""
    how: str = "never written"
    rejected: bool = False
    """The last of those tokens was a guess that turned out wrong."""
    ended: str = ""
    """Why the slot is no longer its sequence's, e.g. `which finished at step 4`."""
    digest: bytes = b""

    @property
    def words(self) -> str:
        """`last written at step 3 by sequence 1 (position 5)`."""
        if self.step is None:
            return "never written"
        if self.sequence is None:
            return f"{self.how} at step {self.step}"
        guess = ", a rejected guess" if self.rejected else ""
        end = f", {self.ended}" if self.ended else ""
        where = f"(position {self.position}{guess}){end}"
        return f"{self.how} at step {self.step} by sequence {self.sequence} {where}"


class Breach(msgspec.Struct, frozen=True, kw_only=True):
    """A broken rule."""

    rule: str
    """`read`, `position`, `content`, `unowned`, `owner` or `plan`."""
    step: int
    line: str
    sequence: int | None = None
    slot: int | None = None
    pool: str = "state"


def digest(row: Tensor) -> bytes:
    """Hash of a slot's bits."""
    return hashlib.blake2b(row.contiguous().view(torch.uint8).numpy().data, digest_size=16).digest()


class Ledger:
    """One pool's slots. Slot 0 is scratch: nobody owns it and its bits are nobody's business."""

    def __init__(self, pool: str, rows: Tensor) -> None:
        """pool: `state` or `conv`, for the lines. rows: [slots, ...] the pool as it is now."""
        self.pool = pool
        self.entries = [Entry(digest=digest(row)) for row in rows]

    @property
    def _what(self) -> str:
        return "" if self.pool == "state" else "the conv state of "

    def check_read(
        self, step: int, slot: int, sequence: int, start: int, who: str, row: Tensor
    ) -> Breach | None:
        """Whether a sequence that has seen `start` tokens may read this slot.

        who: e.g. `sequence 3 (fresh, 1 token)`. row: the slot's content now.
        """
        entry = self.entries[slot]
        line = f"step {step}: {who} read {self._what}slot {slot}, {entry.words}"
        if start == 0 and entry.sequence is None:
            return self._content(step, slot, sequence, line, row)
        if entry.sequence != sequence or entry.ended:
            return self._breach("read", step, line, sequence, slot)
        if entry.rejected or entry.position != start:
            seen = "1 token" if start == 1 else f"{start} tokens"
            line += f"; sequence {sequence} has seen {seen}"
            return self._breach("position", step, line, sequence, slot)
        return self._content(step, slot, sequence, line, row)

    def _content(self, step: int, slot: int, sequence: int, line: str, row: Tensor) -> Breach | None:
        if digest(row) == self.entries[slot].digest:
            return None
        return self._breach("content", step, f"{line}; its bits have changed since", sequence, slot)

    def check_write(
        self, step: int, slot: int, sequence: int, who: str, needed: Collection[tuple[int, int]]
    ) -> Breach | None:
        """Whether a row may write this slot: not one that holds the only copy of what another needs.

        needed: (sequence, position) of every live sequence's state and checkpoint after the call.
        """
        entry = self.entries[slot]
        if slot == 0:
            line = f"step {step}: {who} wrote {self._what}slot 0, which belongs to nobody"
            return self._breach("owner", step, line, sequence, slot)
        if entry.sequence in (None, sequence) or entry.ended or entry.rejected:
            return None
        held = (entry.sequence, entry.position)
        copies = [e for e in self.entries if (e.sequence, e.position) == held and not (e.ended or e.rejected)]
        if held not in needed or len(copies) > 1:
            return None
        line = f"step {step}: {who} wrote {self._what}slot {slot}, {entry.words}, its only copy"
        return self._breach("owner", step, line, sequence, slot)

    def check_kept(
        self, step: int, rows: Tensor, written: Iterable[int], padded: Iterable[int]
    ) -> Breach | None:
        """Whether every slot that no row of the call was to write has the bits it had.

        padded: slots that padded rows with a token point at: such a row writes, whatever is seen of it.
        """
        spared = {0, *written}
        both = next((slot for slot in padded if slot in spared and slot > 0), None)
        if both is not None:
            line = (
                f"step {step}: a padded row wrote {self._what}slot {both}, which a row of the call writes too"
            )
            return self._breach("unowned", step, line, None, both)
        for slot, entry in enumerate(self.entries):
            if slot in spared or digest(rows[slot]) == entry.digest:
                continue
            by = "a padded row wrote" if slot in set(padded) else "the call changed"
            whose = f"slot {slot}, which no row of it was to write, {entry.words}"
            return self._breach(
                "unowned", step, f"step {step}: {by} {self._what}{whose}", entry.sequence, slot
            )
        return None

    def _breach(self, rule: str, step: int, line: str, sequence: int | None, slot: int) -> Breach:
        return Breach(rule=rule, step=step, line=line, sequence=sequence, slot=slot, pool=self.pool)

    def write(
        self, step: int, slot: int, sequence: int, position: int, row: Tensor, *, rejected: bool
    ) -> None:
        """Note a write that was to be."""
        self.entries[slot] = Entry(sequence, position, step, "last written", rejected, digest=digest(row))

    def clear(self, step: int, slot: int, row: Tensor) -> None:
        """Note that a slot was filled with zeros."""
        self.entries[slot] = Entry(step=step, how="cleared", digest=digest(row))

    def copy(self, step: int, source: int, target: int, row: Tensor) -> None:
        """Note that a slot was copied, with all that is known of it."""
        known = self.entries[source]
        self.entries[target] = Entry(
            known.sequence, known.position, known.step, known.how, known.rejected, known.ended, digest(row)
        )

    def load(self, step: int, slot: int, sequence: int, row: Tensor) -> None:
        """Note that a sequence's given state was put into a slot: it has seen no token of the history."""
        self.entries[slot] = Entry(sequence, 0, step, "loaded", digest=digest(row))

    def end(self, step: int, sequence: int, why: str, keep_position: int | None = None) -> None:
        """A sequence's slots are its own no longer, but for its checkpoint at keep_position."""
        for entry in self.entries:
            mine = entry.sequence == sequence and not entry.ended
            if mine and (keep_position is None or entry.position != keep_position or entry.rejected):
                entry.ended = f"which {why} at step {step}"
