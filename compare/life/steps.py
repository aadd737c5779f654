"""A history: what an engine does with its sequences, step by step, as plain data.

The idea: a history says what is asked for (this sequence gets five more tokens, that one is preempted) and
nothing of slots: which slot is read and which written is the bookkeeper's business, and that is what is
tested. So one history fits every bookkeeper and kernel, can be stored, cut down and run again. A token's
inputs depend on its sequence and position only (`tokens`), so a shorter history keeps the values.

Which histories make sense is `legal`'s; drawing them is `draw`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from ...capture.atomic import atomic_path
from ...capture.errors import BadInput

FORMAT = 1
Padding = Literal["-1", "0", "stale"]


class Prefill(msgspec.Struct, frozen=True, kw_only=True, tag_field="row", tag="prefill"):
    """Some more tokens of a prompt, the first chunk of which may be a single one."""

    sequence: int
    tokens: int
    keep: bool = False
    """The state before this call stays behind as a checkpoint, so the new one goes to another slot."""


class Decode(msgspec.Struct, frozen=True, kw_only=True, tag_field="row", tag="decode"):
    """One token."""

    sequence: int
    keep: bool = False


class Verify(msgspec.Struct, frozen=True, kw_only=True, tag_field="row", tag="verify"):
    """The token sampled last and `draft` guesses, of which the first `accepted` turn out right."""

    sequence: int
    draft: int
    accepted: int


Row = Prefill | Decode | Verify


class Arrive(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="arrive"):
    """Sequences are admitted and need slots."""

    sequences: tuple[int, ...]


class Call(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="call"):
    """One forward call: a row per sequence, and padded rows behind them (a replayed graph)."""

    rows: tuple[Row, ...]
    padded: int = 0
    padding: Padding = "-1"
    """What the tail of the index buffer must become: `-1` and `0` are rows of one token that owns no slot
    (index -1, or slot 0 which nobody owns); `stale`: rows without a token whose old index is left over."""


class Preempt(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="preempt"):
    """A sequence stops. `kept`: its slots stay its own; `dropped`: they go back, but for a checkpoint."""

    sequence: int
    state: Literal["kept", "dropped"] = "dropped"


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="resume"):
    """It comes back: with the state that was kept, from its checkpoint, or from zero, all computed anew."""

    sequence: int
    source: Literal["kept", "checkpoint", "zero"] = "zero"


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="finish"):
    """A sequence ends; its slots are handed to whoever comes next."""

    sequence: int


Step = Arrive | Call | Preempt | Resume | Finish


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Steps, and how much room the engine has."""

    steps: tuple[Step, ...]
    slots: int = 16
    """Rows of the pool; slot 0 belongs to nobody."""
    draft: int = 3
    """Longest draft: a sequence owns one slot more than that, a state column for each token of a verify."""
    seed: int = 0
    """Of the tokens' inputs."""
    number: int | None = None
    """Of a drawn history: it is a function of (seed, number)."""
    name: str = "history"
    format: int = FORMAT

    def with_steps(self, steps: tuple[Step, ...]) -> History:
        """The same engine and tokens with other steps."""
        return msgspec.structs.replace(self, steps=steps)


def row_words(row: Row) -> str:
    """`prefill 5 of sequence 3`."""
    kept = ", checkpoint kept" if getattr(row, "keep", False) else ""
    if isinstance(row, Prefill):
        return f"prefill {row.tokens} of sequence {row.sequence}{kept}"
    if isinstance(row, Decode):
        return f"decode sequence {row.sequence}{kept}"
    return f"verify sequence {row.sequence}: {row.accepted} of {row.draft} accepted"


def step_words(step: Step) -> str:
    """One line for a step."""
    if isinstance(step, Call):
        tail = f" + {step.padded} padded row(s), index {step.padding}" if step.padded else ""
        return "call: " + "; ".join(row_words(r) for r in step.rows) + tail
    if isinstance(step, Preempt):
        return f"preempt sequence {step.sequence}, state {step.state}"
    if isinstance(step, Resume):
        return f"resume sequence {step.sequence} from {step.source}"
    if isinstance(step, Arrive):
        return f"arrive sequence {', '.join(map(str, step.sequences))}"
    return f"finish sequence {step.sequence}"


def dumps(history: History) -> str:
    """JSON, one step a line."""
    steps = ",\n".join("  " + msgspec.json.encode(step).decode() for step in history.steps)
    head = msgspec.to_builtins(history)
    del head["steps"]
    body = msgspec.json.encode(head).decode()
    return f'{body[:-1]},"steps":[\n{steps}\n]}}\n'


def write_history(history: History, path: Path) -> None:
    """Write a history, whole or not at all. Raises BadInput where the folder cannot be written."""
    with atomic_path(path) as temporary:
        temporary.write_text(dumps(history), encoding="utf-8")


def read_history(path: Path | str) -> History:
    """Read a history. Raises BadInput for a file that is none."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}); give a history file") from error
    try:
        history = msgspec.json.decode(content, type=History)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise BadInput(f"{path}: no history ({error}); see docs/life.md for the format") from error
    if history.format != FORMAT:
        raise BadInput(f"{path}: format {history.format} of a history; this version reads {FORMAT}")
    if not (2 <= history.slots <= 4096 and 0 <= history.draft <= 64):
        raise BadInput(f"{path}: {history.slots} slots and drafts of {history.draft}; give 2..4096 and 0..64")
    return history
