"""Random histories: a function of (seed, number), as a fuzzer wants them; and the named ones.

The idea: an engine under load. Sequences arrive while there is room, prompts come in chunks (a first chunk of
a single token is as common as a long one), batches mix prefill, decode and verify, and sequences are
preempted, resumed and finished so often that slots are handed on all the time. The dice are Python's own
Mersenne twister on one integer, the same on every machine.
"""

from __future__ import annotations

from random import Random
from typing import Literal

from .legal import Scene
from .steps import Arrive, Call, Decode, Finish, History, Padding, Preempt, Prefill, Resume, Row, Step, Verify

SLOTS, DRAFT = 30, 3
PADDINGS: tuple[Padding, ...] = ("-1", "0", "stale")
FIRST_CHUNKS = (1, 1, 1, 1, 2, 3, 5, 8, 13)
CHUNKS = (1, 2, 3, 4, 5, 7)
MOST_ROWS, MOST_PADDED = 4, 3
# Chances per step, of those that make sense then; the rest are calls.
ARRIVAL, END, STOP, RETURN = 0.3, 0.09, 0.24, 0.8


def draw_history(
    seed: int,
    number: int,
    n_steps: int = 200,
    *,
    slots: int = SLOTS,
    draft: int = DRAFT,
    longest: int = 13,
    checkpoints: bool = True,
) -> History:
    """History `number` of a seed, with exactly n_steps steps.

    longest: tokens of a prefill chunk at most. checkpoints: whether a call may leave one behind.
    """
    dice = Random(f"life {seed} {number}")
    scene = Scene(slots, draft)
    steps: list[Step] = []
    while len(steps) < n_steps:
        step = scene.admit(_wish(dice, scene, longest, checkpoints=checkpoints))
        if step is not None:
            steps.append(step)
    return History(
        steps=tuple(steps), slots=slots, draft=draft, seed=seed, number=number, name=f"random {seed}/{number}"
    )


def _wish(dice: Random, scene: Scene, longest: int, *, checkpoints: bool) -> Step:
    """A step that an engine might take next; the scene may still refuse it."""
    running = scene.running
    stopped = [s for s in scene.live if s not in running]
    if not scene.live or (scene.free > scene.draft and dice.random() < ARRIVAL):
        return Arrive(sequences=(max(scene.seen, default=-1) + 1,))
    if stopped and (not running or dice.random() < RETURN * len(stopped) / len(scene.live)):
        # A scene makes of these what it can: a state that was kept is taken up again, whatever is wished.
        source: Literal["checkpoint", "zero"] = "checkpoint" if dice.random() < 0.8 else "zero"
        return Resume(sequence=dice.choice(stopped), source=source)
    if dice.random() < END:
        return Finish(sequence=dice.choice(list(scene.live)))
    if dice.random() < STOP:
        return Preempt(sequence=dice.choice(running), state="kept" if dice.random() < 0.4 else "dropped")
    chosen = dice.sample(running, k=min(len(running), dice.randint(1, MOST_ROWS)))
    rows = tuple(_row(dice, scene, sequence, longest, checkpoints=checkpoints) for sequence in chosen)
    padded = dice.randint(1, MOST_PADDED) if dice.random() < 0.5 else 0
    return Call(rows=rows, padded=padded, padding=dice.choice(PADDINGS))


def _row(dice: Random, scene: Scene, sequence: int, longest: int, *, checkpoints: bool) -> Row:
    position = scene.live[sequence].position
    if position == 0:
        return Prefill(sequence=sequence, tokens=min(dice.choice(FIRST_CHUNKS), longest))
    kind = dice.random()
    if kind < 0.25:
        tokens = min(dice.choice(CHUNKS), longest)
        return Prefill(sequence=sequence, tokens=tokens, keep=dice.random() < 0.7 and checkpoints)
    if kind < 0.65 or scene.draft == 0:
        return Decode(sequence=sequence, keep=dice.random() < 0.7 and checkpoints)
    draft = dice.randint(1, scene.draft)
    return Verify(sequence=sequence, draft=draft, accepted=dice.randint(0, draft))
