"""Between a history's row and a bookkeeper's plan: what is asked for, and whether the plan answers it.

The idea: a plan is somebody else's code, so its shape is checked before anything is done with it, and what is
wrong is said in one line. Whether the slots are the right ones is the ledger's business.
"""

from __future__ import annotations

from .bookkeeping import Plan, Request, RowRequest
from .steps import Decode, Prefill, Row, Verify


def request_of(row: Row) -> RowRequest:
    kind = "prefill" if isinstance(row, Prefill) else "decode" if isinstance(row, Decode) else "verify"
    keep = bool(getattr(row, "keep", False))
    return RowRequest(sequence=row.sequence, kind=kind, tokens=tokens_of(row), keep=keep)  # type: ignore[arg-type]


def tokens_of(row: Row) -> int:
    """Tokens that a row runs."""
    return row.tokens if isinstance(row, Prefill) else 1 if isinstance(row, Decode) else row.draft + 1


def right_of(row: Row) -> int:
    """Those that its sequence has seen afterwards."""
    return row.accepted + 1 if isinstance(row, Verify) else tokens_of(row)


def who_is(row: Row, start: int) -> str:
    """`sequence 3 (fresh, 1 token)`."""
    n = tokens_of(row)
    tokens = "1 token" if n == 1 else f"{n} tokens"
    return f"sequence {row.sequence} ({'fresh' if start == 0 else f'at position {start}'}, {tokens})"


def check_plan(plan: Plan, request: Request, slots: int) -> str:
    """What makes a plan no plan at all for this request; empty: nothing."""
    if not isinstance(plan, Plan):
        return f"the bookkeeper returned {type(plan).__name__}, not a Plan"
    mine, asked = [r.sequence for r in plan.rows], [r.sequence for r in request.rows]
    if mine != asked:
        return f"the plan has rows of sequences {mine}; {asked} were asked for"
    for row, ask in zip(plan.rows, request.rows, strict=True):
        most = ask.tokens if ask.kind == "verify" else 1
        for what, count in (("writes", len(row.writes)), ("conv_writes", len(row.conv_writes))):
            if count != most:
                return f"sequence {row.sequence}: {what} has {count} slot(s); {most} are written"
        for slot in (row.read, row.conv_read, *row.writes, *row.conv_writes):
            if not 0 <= slot < slots:
                return f"sequence {row.sequence}: slot {slot} is not in a pool of {slots}"
        if row.start < 0:
            return f"sequence {row.sequence}: it starts at position {row.start}"
    for name in ("writes", "conv_writes"):
        every = [slot for row in plan.rows for slot in getattr(row, name)]
        twice = next((slot for slot in every if every.count(slot) > 1), None)
        if twice is not None:
            return f"two rows of one call write slot {twice} ({name})"
    wrong = next((p.slot for p in plan.padded if not -1 <= p.slot < slots), None)
    return "" if wrong is None else f"a padded row points at slot {wrong}; the pool has {slots}"
