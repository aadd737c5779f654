"""Histories with a name: one way of being served each, for the sweep's axis and for `gdncheck life`.

The idea: every sequence of a call, of whatever length, is taken through the same event: its last tokens
decoded one by one, verified with a draft that is refused or taken, preempted half way and resumed, put into a
slot that somebody else has just left, replayed beside padded rows. All its tokens are run, so that output and
final state are those of the plain prefill, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .legal import sensible
from .steps import Arrive, Call, Decode, Finish, History, Padding, Preempt, Prefill, Resume, Row, Step, Verify

DRAFT = 3
TAIL = 4
"""Tokens at the end of a sequence that are decoded or verified."""
TENANT_TOKENS = 5


def _prefills(spans: Sequence[tuple[int, int]], keep: bool = False) -> list[Step]:
    """One call with so many tokens of each sequence that has any."""
    rows = tuple(Prefill(sequence=s, tokens=n, keep=keep) for s, n in spans if n > 0)
    return [Call(rows=rows)] if rows else []


def _heads(lengths: Sequence[int]) -> tuple[list[Step], list[int]]:
    """Everything but the last tokens in one call; and how many those are (a first token is prefilled)."""
    tails = [max(0, min(TAIL, n - 1)) for n in lengths]
    return _prefills([(s, n - t) for s, (n, t) in enumerate(zip(lengths, tails, strict=True))]), tails


def _own(lengths: Sequence[int]) -> list[int]:
    """Sequences with a token; an empty one is never served."""
    return [s for s, n in enumerate(lengths) if n > 0]


def _tenants(lengths: Sequence[int]) -> list[Step]:
    """As many others arrive, leave a state in their slots, and go."""
    others = [len(lengths) + s for s in _own(lengths)]
    steps = [Arrive(sequences=tuple(others)), *_prefills([(t, TENANT_TOKENS) for t in others])]
    return [*steps, *(Finish(sequence=t) for t in others)]


def prefill(lengths: Sequence[int]) -> list[Step]:
    """All tokens in one call."""
    return [Arrive(sequences=tuple(_own(lengths))), *_prefills(list(enumerate(lengths)))]


def prefill_decode(lengths: Sequence[int]) -> list[Step]:
    """The last tokens one by one."""
    return _decoded(lengths, ())


def padded(lengths: Sequence[int]) -> list[Step]:
    """The last tokens one by one, beside padded rows of every kind."""
    return _decoded(lengths, ("stale", "-1", "0"))


def _decoded(lengths: Sequence[int], paddings: tuple[Padding, ...]) -> list[Step]:
    steps, tails = _heads(lengths)
    for t in range(max(tails)):
        rows: tuple[Row, ...] = tuple(Decode(sequence=s) for s, n in enumerate(tails) if n > t)
        padding = paddings[t % len(paddings)] if paddings else "-1"
        steps.append(Call(rows=rows, padded=2 if paddings else 0, padding=padding))
    return [Arrive(sequences=tuple(_own(lengths))), *steps]


def verify_none(lengths: Sequence[int]) -> list[Step]:
    """Every draft is refused: a token a step."""
    steps, tails = _heads(lengths)
    for t in range(max(tails)):
        rows: tuple[Row, ...] = tuple(
            Verify(sequence=s, draft=DRAFT, accepted=0) for s, n in enumerate(tails) if n > t
        )
        steps.append(Call(rows=rows))
    return [Arrive(sequences=tuple(_own(lengths))), *steps]


def verify_all(lengths: Sequence[int]) -> list[Step]:
    """A draft that is right to the end, then a step without one."""
    steps, tails = _heads(lengths)
    drafted: tuple[Row, ...] = tuple(
        Verify(sequence=s, draft=n - 2, accepted=n - 2) for s, n in enumerate(tails) if n > 2
    )
    steps += [Call(rows=drafted)] if drafted else []
    left = [1 if n > 2 else n for n in tails]
    for t in range(max(left)):
        rows: tuple[Row, ...] = tuple(Decode(sequence=s) for s, n in enumerate(left) if n > t)
        steps.append(Call(rows=rows))
    return [Arrive(sequences=tuple(_own(lengths))), *steps]


def preempt_resume(lengths: Sequence[int]) -> list[Step]:
    """Stopped half way; its slot goes to a tenant; it comes back from zero, or (every second one) from a
    checkpoint of its first tokens."""
    own = _own(lengths)
    half = {s: lengths[s] // 2 for s in own}
    quarter = {s: (lengths[s] - half[s]) // 2 for s in own if s % 2 == 1}
    steps = [Arrive(sequences=tuple(own)), *_prefills(list(half.items()))]
    steps += _prefills(list(quarter.items()), keep=True)
    steps += [Preempt(sequence=s, state="dropped") for s in own]
    steps += _tenants(lengths)
    kept = {s for s, n in quarter.items() if n > 0 and half[s] > 0}
    steps += [Resume(sequence=s, source="checkpoint" if s in kept else "zero") for s in own]
    return [*steps, *_prefills([(s, lengths[s] - (half[s] if s in kept else 0)) for s in own])]


def slot_reuse(lengths: Sequence[int]) -> list[Step]:
    """Into the slots that tenants have just left, the first token by itself."""
    own = _own(lengths)
    steps = [*_tenants(lengths), Arrive(sequences=tuple(own)), *_prefills([(s, 1) for s in own])]
    return [*steps, *_prefills([(s, lengths[s] - 1) for s in own])]


NAMED: dict[str, Callable[[Sequence[int]], list[Step]]] = {
    "prefill": prefill,
    "prefill-decode": prefill_decode,
    "verify-0": verify_none,
    "verify-all": verify_all,
    "preempt-resume": preempt_resume,
    "slot-reuse": slot_reuse,
    "padded": padded,
}


def named_history(name: str, lengths: Sequence[int], *, seed: int = 0) -> History:
    """A named history of sequences 0, 1, ... with so many tokens each; some sequence has one."""
    steps = tuple(NAMED[name](list(lengths)))
    # Tenants have come and gone before, or wait until then; a checkpoint is one slot more.
    slots = 1 + len(lengths) * (2 * (1 + DRAFT) + 1)
    return sensible(History(steps=steps, slots=slots, draft=DRAFT, seed=seed, name=name))
