"""Which steps make sense: the engine's own view of its sequences, without any slot.

The idea: cutting a history down leaves steps that mean nothing (a resume of nobody, a decode of a sequence
that has finished). `Scene.admit` is total: it gives back the part of a step that makes sense now, or None,
and moves the scene on. So every list of steps is a history, and delta debugging needs no further care.

A scene also counts slots the way the least bookkeeper needs them, so that a history never asks for more room
than there is: one slot and a column per drafted token for a sequence that runs or is kept, one for a
checkpoint, and slot 0 for nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from .steps import Arrive, Call, Decode, Finish, History, Preempt, Prefill, Resume, Row, Step, Verify


@dataclass
class Progress:
    """How far one sequence has come."""

    position: int = 0
    """Tokens seen: prefilled, decoded or accepted."""
    running: bool = True
    holds: bool = True
    """It owns its slots (running, or preempted with its state kept)."""
    checkpoint: int | None = None
    """Position of its checkpoint."""


@dataclass
class Scene:
    """All sequences that have arrived and not finished."""

    slots: int
    draft: int
    live: dict[int, Progress] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    @property
    def free(self) -> int:
        """Slots that are left."""
        used = 1 + sum(
            (1 + self.draft if p.holds else 0) + (p.checkpoint is not None) for p in self.live.values()
        )
        return self.slots - used

    @property
    def running(self) -> list[int]:
        return [s for s, p in self.live.items() if p.running]

    def admit(self, step: Step) -> Step | None:
        """The part of a step that makes sense, after which the scene has moved on; None: nothing of it."""
        if isinstance(step, Arrive):
            return self._arrive(step)
        if isinstance(step, Call):
            return self._call(step)
        progress = self.live.get(step.sequence)
        if progress is None:
            return None
        if isinstance(step, Preempt):
            if not progress.running:
                return None
            progress.running, progress.holds = False, step.state == "kept"
            return step
        if isinstance(step, Resume):
            return self._resume(step, progress)
        assert isinstance(step, Finish)
        del self.live[step.sequence]
        return step

    def _arrive(self, step: Arrive) -> Arrive | None:
        admitted = []
        for sequence in step.sequences:
            if sequence in self.seen or sequence < 0 or self.free < 1 + self.draft:
                continue
            self.seen.add(sequence)
            self.live[sequence] = Progress()
            admitted.append(sequence)
        return msgspec.structs.replace(step, sequences=tuple(admitted)) if admitted else None

    def _resume(self, step: Resume, progress: Progress) -> Resume | None:
        if progress.running or (not progress.holds and self.free < 1 + self.draft):
            return None
        source = step.source
        if source == "kept" and not progress.holds:
            source = "zero"
        if source == "checkpoint" and progress.checkpoint is None:
            source = "zero"
        if source != "kept" and progress.holds:
            source = "kept"
        if source == "checkpoint":
            assert progress.checkpoint is not None
            progress.position = progress.checkpoint
        elif source == "zero":
            progress.position, progress.checkpoint = 0, None
        progress.running = progress.holds = True
        return msgspec.structs.replace(step, source=source)

    def _call(self, step: Call) -> Call | None:
        rows: list[Row] = []
        for row in step.rows:
            progress = self.live.get(row.sequence)
            if progress is None or not progress.running or any(r.sequence == row.sequence for r in rows):
                continue
            admitted = self._row(row, progress)
            if admitted is not None:
                rows.append(admitted)
        if not rows:
            return None
        # Graphs are replayed for decode and verify steps; a prefill is never padded.
        padded = 0 if any(isinstance(r, Prefill) for r in rows) else max(step.padded, 0)
        return msgspec.structs.replace(step, rows=tuple(rows), padded=padded)

    def _row(self, row: Row, progress: Progress) -> Row | None:
        if isinstance(row, Verify):
            draft = min(row.draft, self.draft)
            if progress.position == 0 or draft < 1:
                return None
            accepted = min(max(row.accepted, 0), draft)
            progress.position += accepted + 1
            return msgspec.structs.replace(row, draft=draft, accepted=accepted)
        if isinstance(row, Decode) and progress.position == 0:
            return None
        tokens = row.tokens if isinstance(row, Prefill) else 1
        if tokens < 1:
            return None
        keep = row.keep and progress.position > 0 and (progress.checkpoint is not None or self.free >= 1)
        if keep:
            progress.checkpoint = progress.position
        progress.position += tokens
        return msgspec.structs.replace(row, keep=keep)


def sensible(history: History) -> History:
    """The history without what makes no sense in it."""
    scene = Scene(history.slots, history.draft)
    admitted = (scene.admit(step) for step in history.steps)
    return history.with_steps(tuple(step for step in admitted if step is not None))
