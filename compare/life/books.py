"""Both ledgers of a run, held against a plan: before the call, after it, and what is noted down.

The idea: state and conv have a pool and a ledger each, and every rule holds in both; so each is written once
here and walked over the pair. The rules and their lines are `ledger`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor

from .bookkeeping import Plan, RowPlan
from .ledger import Breach, Ledger
from .machine import Pools
from .plans import right_of, tokens_of, who_is
from .steps import Call, Verify


class Books:
    """The ledgers of the state's pool and of the conv's."""

    def __init__(self, pools: Pools) -> None:
        self.pools = pools
        self.state, self.conv = Ledger("state", pools.state), Ledger("conv", pools.conv)

    def _each(self) -> Iterator[tuple[Ledger, Tensor]]:
        yield self.state, self.pools.state
        yield self.conv, self.pools.conv

    def prepare(self, step: int, plan: Plan, starts: Mapping[int, Tensor]) -> None:
        """Clears, copies, and the states that sequences were given (by sequence, [HV, K, V])."""
        for ledger, pool in self._each():
            for slot in plan.clears:
                pool[slot] = 0
                ledger.clear(step, slot, pool[slot])
            for source, target in plan.copies:
                pool[target] = pool[source]
                ledger.copy(step, source, target, pool[target])
        for row in plan.rows:
            if row.sequence not in starts:
                continue
            self.pools.state[row.read] = starts[row.sequence].to(self.pools.state.dtype)
            self.pools.conv[row.conv_read] = 0
            self.state.load(step, row.read, row.sequence, self.pools.state[row.read])
            self.conv.load(step, row.conv_read, row.sequence, self.pools.conv[row.conv_read])

    def check_reads(self, step: int, call: Call, plan: Plan, seen: Mapping[int, int]) -> list[Breach]:
        """What is wrong with what the rows are going to read.

        seen: sequence -> tokens that it has seen.
        """
        found: list[Breach | None] = []
        for row, asked in zip(plan.rows, call.rows, strict=True):
            start = seen[row.sequence]
            who = who_is(asked, start)
            found.append(self._position(step, row, start, who))
            if row.fresh:
                continue
            reads = ((self.state, row.read, self.pools.state), (self.conv, row.conv_read, self.pools.conv))
            for ledger, slot, pool in reads:
                found.append(ledger.check_read(step, slot, row.sequence, start, who, pool[slot]))
        return [breach for breach in found if breach is not None]

    def _position(self, step: int, row: RowPlan, start: int, who: str) -> Breach | None:
        """position = tokens seen, of what is fed."""
        held = f"it read slot {row.read}, {self.state.entries[row.read].words}"
        tokens = "1 token" if start == 1 else f"{start} tokens"
        if row.start != start:
            line = f"step {step}: {who} was fed from token {row.start} on, but it has seen {tokens} ({held})"
        elif row.fresh and start > 0:
            line = f"step {step}: {who} started from zero, but it has seen {tokens} ({held})"
        else:
            return None
        return Breach(rule="position", step=step, line=line, sequence=row.sequence, slot=row.read)

    def check_writes(self, step: int, plan: Plan, needed: Collection[tuple[int, int]]) -> list[Breach]:
        """What is wrong with what the call wrote. needed: (sequence, position) of what will be read again."""
        found: list[Breach | None] = []
        padded = [p.slot for p in plan.padded if p.tokens]
        for (ledger, pool), name in zip(self._each(), ("writes", "conv_writes"), strict=True):
            written = [(row.sequence, slot) for row in plan.rows for slot in getattr(row, name)]
            for sequence, slot in written:
                found.append(ledger.check_write(step, slot, sequence, f"sequence {sequence}", needed))
            found.append(ledger.check_kept(step, pool, [slot for _, slot in written], padded))
        return [breach for breach in found if breach is not None]

    def note(self, step: int, call: Call, plan: Plan, seen: Mapping[int, int]) -> None:
        """Write down what the rows have written. seen: tokens before the call."""
        for row, asked in zip(plan.rows, call.rows, strict=True):
            start, right = seen[row.sequence], right_of(asked)
            ends = range(1, tokens_of(asked) + 1) if isinstance(asked, Verify) else [tokens_of(asked)]
            for (ledger, pool), slots in zip(self._each(), (row.writes, row.conv_writes), strict=True):
                for slot, end in zip(slots, ends, strict=True):
                    ledger.write(step, slot, row.sequence, start + end, pool[slot], rejected=end > right)

    def end(self, step: int, sequence: int, why: str, kept: int | None = None) -> None:
        """A sequence's slots are its own no longer, but for its checkpoint at position `kept`."""
        for ledger, _ in self._each():
            ledger.end(step, sequence, why, kept)

    def row_words(self, row: RowPlan) -> str:
        """What is known of a row: `sequence 1 read slot 5 at position 3 and wrote slot 5`."""
        read = "started from zero" if row.fresh else f"read slot {row.read}"
        wrote = ", ".join(map(str, row.writes))
        return f"sequence {row.sequence} {read} at position {row.start} and wrote slot {wrote}"
