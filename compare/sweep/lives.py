"""A case taken through a named history: its own tokens, in the calls that an engine might make of them.

The idea: axis `life` changes no number of a case, only how it is served. So the history runs with the sound
bookkeeper on the simulated pool (`compare.life`), the outputs of its tokens and the last states are put
together, and the judge sees them as it sees a split prefill: the truth of the whole case, the yardstick
handed on at the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...capture.case import Case, starting_state
from ...kernels.interface import KernelInfo, RunOptions
from ..axes.axis import Ran, Setup
from ..axes.recase import rule_only, starts, starts_from_state
from ..axes.schedule import Step as Segments
from ..checks import slots
from ..life.bookkeeping import Bookkeeper
from ..life.legal import Scene
from ..life.machine_kernels import KernelMachine
from ..life.named import named_history
from ..life.run import Run, Told
from ..life.steps import Call, History, Resume, Verify
from ..life.tokens import Place, Sizes
from ..verdict import Outcome


class CaseTokens:
    """The tokens of a case; a rejected guess, or a tenant's token, is another one of the same sequence."""

    def __init__(self, case: Case) -> None:
        self.case, self.at = rule_only(case), starts(case)
        q, v = case["q"], case["v"]
        dtype = str(v.dtype).removeprefix("torch.")
        self.sizes = Sizes(
            k_heads=q.shape[1], v_heads=v.shape[1], key_dim=q.shape[2], value_dim=v.shape[2], dtype=dtype,
            conv_channels=0,
        )  # fmt: skip
        self.weight = torch.zeros(0, self.sizes.taps)
        self.g = self.case["g"].log() if case.options.gate_space == "linear" else self.case["g"]
        self.started, self.state = starts_from_state(self.case), starting_state(self.case)

    def start(self, sequence: int) -> Tensor | None:
        if sequence >= len(self.at) - 1 or self.state is None or not bool(self.started[sequence]):
            return None
        state: Tensor = self.state[sequence]
        return state

    def rule(self, places: Sequence[Place]) -> dict[str, Tensor]:
        rows = torch.tensor([self._row(place) for place in places], dtype=torch.int64)
        found = {name: self.case[name][rows] for name in ("q", "k", "v", "beta")}
        return {**found, "g": self.g[rows]}

    def conv(self, places: Sequence[Place]) -> Tensor:
        return torch.zeros(len(places), 0)

    def _row(self, place: Place) -> int:
        sequence, position, wrong = place
        own = sequence % (len(self.at) - 1)
        length = self.at[own + 1] - self.at[own]
        if wrong or own != sequence or position >= length:
            position = (7 * position + 3) % length
        return self.at[own] + position


def life_conversation(setup: Setup, info: KernelInfo) -> Any:
    """The calls of a setup's history, one by one (`engine.conversation`)."""
    history = history_of(tuple(setup.case.lengths), setup.life)
    run = Run(
        history, _machine(setup, info), Bookkeeper, CaseTokens(setup.case),
        state_dtype=getattr(torch, _state_dtype(setup)), judged=False,
    )  # fmt: skip
    talk = run.talk()
    evidence: dict[str, Any] = {}
    calls, seconds = 0, 0.0
    try:
        _, call = next(talk)
        while True:
            result = yield call
            calls, seconds = calls + 1, seconds + (result.seconds or 0.0)
            if result.status == "ok":
                evidence = _merged(evidence, result.evidence)
            _, call = talk.send(result)
    except StopIteration as end:
        told: Told = end.value
    return _ran(setup, history, told, evidence, calls, seconds)


def _machine(setup: Setup, info: KernelInfo) -> KernelMachine:
    case = setup.case
    return KernelMachine(
        {"prefill": info, "decode": info, "verify": info},
        CaseTokens(case).sizes,
        getattr(torch, _state_dtype(setup)),
        options=RunOptions(scale=case.scale, qk=case.options.qk, **setup.options),
    )


def _state_dtype(setup: Setup) -> str:
    state = starting_state(setup.case)
    kept = torch.float32 if state is None else state.dtype
    return setup.state_dtype or str(kept).removeprefix("torch.")


def _ran(
    setup: Setup, history: History, told: Told, evidence: dict[str, Any], calls: int, seconds: float
) -> Ran:
    """What the history came to, in the case's own order."""
    failure = told.failure
    if failure is not None and failure.status != "fail":
        status: Any = failure.status
        return Ran(status=status, message=failure.line, evidence=evidence, calls=calls)
    further: tuple[Outcome, ...] = ()
    if failure is not None:
        further = (Outcome(check=slots.NAME, tier=4, status="fires", reason=failure.line),)
        if any(n and (s, n - 1) not in told.outputs for s, n in enumerate(setup.case.lengths)):
            return Ran(status="shape", message=failure.line, evidence=evidence, calls=calls, further=further)
    places = [(s, t) for s, n in enumerate(setup.case.lengths) for t in range(n)]
    evidence |= {
        "life": f"{told.calls} steps of {history.name}, {told.tokens} tokens, {told.padded} padded rows",
        "padded_rows": told.padded,
        "state_kept_in": _state_dtype(setup),
    }
    return Ran(
        status="ok",
        output=torch.stack([told.outputs[place] for place in places]),
        state=torch.stack([_last_state(setup, told, s) for s in range(setup.case.n_sequences)]),
        seconds=seconds,
        evidence=evidence,
        calls=calls,
        further=further,
    )


def _last_state(setup: Setup, told: Told, sequence: int) -> Tensor:
    """[HV, K, V]; of an empty sequence, which is never served, what it starts from."""
    if sequence in told.states:
        return told.states[sequence]
    tokens = CaseTokens(setup.case)
    start = tokens.start(sequence)
    shape = (tokens.sizes.v_heads, tokens.sizes.key_dim, tokens.sizes.value_dim)
    dtype: torch.dtype = getattr(torch, _state_dtype(setup))
    return torch.zeros(shape, dtype=dtype) if start is None else start.to(dtype)


def _merged(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    from .engine import _merged as merged

    return merged(before, now)


@lru_cache(maxsize=64)
def history_of(lengths: tuple[int, ...], name: str) -> History:
    """A named history of a case."""
    return named_history(name, lengths)


def life_steps(lengths: Sequence[int], name: str, *, columns: bool) -> list[Segments]:
    """Which tokens of the case's own sequences were run by which call, as a schedule has it.

    A sequence that comes back goes on from where it did; what is run again counts as run there. columns: a
    verify is one call; else each of its tokens is one, the state rounded in between.
    """
    history = history_of(tuple(lengths), name)
    scene = Scene(history.slots, history.draft)
    done: list[Segments] = []
    for step in history.steps:
        scene_before = {s: p.position for s, p in scene.live.items()}
        admitted = scene.admit(step)
        if isinstance(admitted, Resume) and admitted.source != "kept":
            back = scene.live[admitted.sequence].position
            done = [[x for x in part if x[0] != admitted.sequence or x[1] < back] for part in done]
        if not isinstance(admitted, Call):
            continue
        own = [row for row in admitted.rows if row.sequence < len(lengths)]
        spans = [(r.sequence, scene_before[r.sequence], scene.live[r.sequence].position) for r in own]
        if columns or not any(isinstance(r, Verify) for r in own):
            done.append(spans)
            continue
        longest = max(b - a for _, a, b in spans)
        done += [[(s, a + t, a + t + 1) for s, a, b in spans if a + t < b] for t in range(longest)]
    return [part for part in done if part]
