"""A sound kernel in which one fault at a time can be planted, for `gdncheck selftest`.

The idea: a tool that has never been seen to fail proves nothing. `rule` is the chunk algorithm in bf16 as
torch computes it on this machine's device; with `fault=NAME` it goes wrong at a known place, in one
configuration only where the fault is of an axis, and everywhere else keeps its twin's bits. All faults live
in one function, so that one worker serves them all.

Leaves to others: which check must find which fault (`compare.selftest`), a tuned Triton kernel with one bad
configuration (`planted_triton`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..reference.emulation import emulate_chunk

PROFILE = "fla-0.4"
CHUNK = 64
# Where faults are planted: the second token of the last chunk of the third sequence, in the last head.
SEQUENCE, HEAD, TOKEN = 2, 1, 65
FACTOR = 1.5

_memory: dict[str, Any] = {}
"""What faults remember from call to call; a worker's own."""


@dataclass
class Call:
    """One call's arguments and, after the sound kernel ran, its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float
    state: Tensor | None
    cu_seqlens: Tensor
    chunk_size: int
    has_state: Tensor | None
    output: Tensor
    final: Tensor

    @property
    def bounds(self) -> list[int]:
        return [int(n) for n in self.cu_seqlens]

    @property
    def lengths(self) -> list[int]:
        bounds = self.bounds
        return [b - a for a, b in pairwise(bounds)]

    @property
    def row(self) -> int:
        """The planted row; the last one where a call is too small to have it."""
        bounds = self.bounds
        here = bounds[SEQUENCE] + TOKEN if len(bounds) > SEQUENCE + 1 else bounds[-1] - 1
        return min(here, bounds[-1] - 1)

    def spoil(self) -> None:
        """Half as large again, at the planted place."""
        self.output[self.row, -1] *= FACTOR


Edit = Callable[[Call], None]


def rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor,
    chunk_size: int = CHUNK,
    has_initial_state: Tensor | None = None,
    fault: str = "",
) -> tuple[Tensor, Tensor]:
    """The rule; see the module. Raises KeyError for a fault that is not in the tables."""
    del output_final_state
    call = Call(
        q, k, v, g, beta, scale, initial_state, cu_seqlens, chunk_size, has_initial_state,
        torch.empty_like(v), torch.empty(0),
    )  # fmt: skip
    if fault and fault not in FAULTS:
        raise KeyError(f"no fault {fault!r}; there are {', '.join(FAULTS)}")
    before, after = FAULTS.get(fault, (_nothing, _nothing))
    before(call)
    result = _sound(call)
    call.output.copy_(result.output.to(v.dtype))
    call.final = result.final_state.float()
    after(call)
    _memory["lengths"] = call.lengths
    kept = torch.float32 if initial_state is None else initial_state.dtype
    return call.output, call.final.to(kept)


rule.gdncheck_capabilities = {  # type: ignore[attr-defined]
    "chunk_sizes": (32, CHUNK),
    "state_dtypes": ("float32", "bfloat16", "float16"),
    "profile": PROFILE,
}


def _sound(call: Call) -> Any:
    state = call.state
    if state is not None and call.has_state is not None:
        state = torch.where(call.has_state.bool().view(-1, 1, 1, 1), state, torch.zeros_like(state))
    return emulate_chunk(
        call.q, call.k, call.v, call.g, call.beta, precision=PROFILE, chunk_size=call.chunk_size,
        scale=call.scale, initial_state=state, cu_seqlens=call.cu_seqlens,
    )  # fmt: skip


def _nothing(call: Call) -> None:
    """Sound."""


# Faults in what is computed, by the tier that must see them.


def _values_swapped(call: Call) -> None:
    call.v = call.v.clone()
    call.v[[1, 2], HEAD] = call.v[[2, 1], HEAD]


def _one_nan(call: Call) -> None:
    call.output[call.row, HEAD, 0] = torch.nan


def _state_too_large(call: Call) -> None:
    call.final[SEQUENCE, HEAD] *= 1e6


def _tail_not_in_state(call: Call) -> None:
    """The last chunk of the sequence, a partial one, never reaches its state."""
    start, stop = call.bounds[SEQUENCE : SEQUENCE + 2]
    whole = start + (stop - start - 1) // call.chunk_size * call.chunk_size
    beta, g = call.beta.clone(), call.g.clone()
    beta[whole:stop], g[whole:stop] = 0, 0
    shorter = Call(**{**vars(call), "beta": beta, "g": g})
    call.final[SEQUENCE] = _sound(shorter).final_state[SEQUENCE].float()


def _one_chunk_off(call: Call) -> None:
    start = call.bounds[SEQUENCE]
    call.output[start : start + CHUNK, HEAD] *= 1 + 2.0**-5


def _state_rounded(call: Call) -> None:
    call.final = call.final.bfloat16().float()


def _future_leaks(call: Call) -> None:
    """Every token sees a little of the next one's value."""
    following = torch.roll(call.v, -1, 0)
    last = [stop - 1 for stop in call.bounds[1:]]
    following[last] = call.v[last]
    call.output += (following.float() * 2.0**-5).to(call.output.dtype)


def _neighbour_leaks(call: Call) -> None:
    """A sequence's first token sees the last one of the sequence before it."""
    for start in call.bounds[1:-1]:
        if 0 < start < len(call.v):
            call.output[start] += (call.v[start - 1].float() * 2.0**-5).to(call.output.dtype)


# Faults in one configuration only, by axis.


def _wrong_chunk_32(call: Call) -> None:
    if call.chunk_size == 32:
        call.spoil()


def _after_64n_plus_1(call: Call) -> None:
    """The state is forgotten where the call before ended at 64n+1 tokens."""
    if call.state is not None and any(n > 1 and n % CHUNK == 1 for n in _memory.get("lengths", ())):
        call.state = torch.zeros_like(call.state)


def _poisoned_neighbour(call: Call) -> None:
    """Rows next to a sequence are multiplied by zero instead of being left out."""
    for start in call.bounds[1:-1]:
        if 0 < start < len(call.v):
            call.output[start] += 0 * call.v[start - 1]


def _stale_slot(call: Call) -> None:
    call.has_state = None


def _wrong_bf16_state(call: Call) -> None:
    if call.state is not None and call.state.dtype == torch.bfloat16:
        call.spoil()


def _wrong_fp16(call: Call) -> None:
    if call.v.dtype == torch.float16:
        call.spoil()


def _row_not_written(call: Call) -> None:
    """The planted row keeps what its memory held, where that is NaN all over, as nothing but poison makes it.

    A GPU's allocator hands out again what an earlier call, poisoned elsewhere, has left.
    """
    fresh = torch.empty_like(call.output)
    poisoned, held = fresh.isnan().all(), fresh[call.row, HEAD].clone()
    fresh.copy_(call.output)
    fresh[call.row, HEAD] = torch.where(poisoned, held, fresh[call.row, HEAD])
    call.output = fresh


def _one_head_left(call: Call) -> None:
    if call.v.shape[1] == 1:
        call.spoil()


# Faults in time.


def _counted(name: str) -> int:
    """How many calls this fault has seen before, in this process."""
    seen = int(_memory.get(name, 0))
    _memory[name] = seen + 1
    return seen


def _first_call(call: Call) -> None:
    if _counted("first-call") == 0:
        call.spoil()


def _every_fourth_call(call: Call) -> None:
    if _counted("every-fourth-call") % 4 == 2:
        call.output[call.row, HEAD] = torch.nan


def _bits_move(call: Call) -> None:
    """One entry moves within its rounding from call to call."""
    if _counted("bits-move") % 2:
        call.output[call.row, HEAD, 0] *= 1 + 2.0**-7


# Faults of the process.


def _crash(call: Call) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang(call: Call) -> None:
    time.sleep(3600)


FAULTS: dict[str, tuple[Edit, Edit]] = {
    "values-swapped": (_values_swapped, _nothing),
    "one-nan": (_nothing, _one_nan),
    "state-too-large": (_nothing, _state_too_large),
    "tail-not-in-state": (_nothing, _tail_not_in_state),
    "one-chunk-off": (_nothing, _one_chunk_off),
    "state-rounded": (_nothing, _state_rounded),
    "future-leaks": (_nothing, _future_leaks),
    "neighbour-leaks": (_nothing, _neighbour_leaks),
    "wrong-chunk-32": (_nothing, _wrong_chunk_32),
    "after-64n+1": (_after_64n_plus_1, _nothing),
    "poisoned-neighbour": (_nothing, _poisoned_neighbour),
    "stale-slot": (_stale_slot, _nothing),
    "wrong-bf16-state": (_nothing, _wrong_bf16_state),
    "wrong-fp16": (_nothing, _wrong_fp16),
    "row-not-written": (_nothing, _row_not_written),
    "one-head-left": (_nothing, _one_head_left),
    "first-call": (_nothing, _first_call),
    "every-fourth-call": (_nothing, _every_fourth_call),
    "bits-move": (_nothing, _bits_move),
    "crash": (_crash, _nothing),
    "hang": (_hang, _nothing),
}
"""Name -> what is done to the call, and to its results."""
