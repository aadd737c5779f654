"""The engine around the kernel, simulated: run a setup's calls and put their results together.

The idea: an engine keeps states in a pool. For every call it gathers the rows of the call's sequences
(zeros where one starts fresh), runs the kernel, and scatters the final states back in the pool's dtype. A
kernel that addresses a pool in place is given the pool; every other adapter gathers, as its engine would. So
a split prefill, a stale slot and a rounded hand-over are all one loop over one pool.

Which tokens go into which call is `axes.schedule`'s; judging is `judging`'s.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from ...capture.case import Case, starting_state
from ...kernels.interface import KernelCall, KernelInfo, RunResult
from ...kernels.poison import HUGE
from ..axes.axis import Ran, Setup, SlotPlan
from ..axes.recase import PER_TOKEN, rule_only, starts, starts_from_state, state_like
from ..axes.schedule import Step, steps_of
from ..checks import shape, slots
from ..inputs import call_of, inputs_of
from ..verdict import Outcome
from .lives import life_conversation

# Slots of the pool that no sequence of the call owns.
SPARE_SLOTS = 3


class Calls(Protocol):
    """Runs calls in one process, in order."""

    def run(self, calls: list[KernelCall]) -> list[RunResult]: ...


Conversation = Generator[KernelCall, RunResult, Ran]


def run_setup(calls: Calls, setup: Setup, info: KernelInfo) -> Ran:
    """Run a setup once: one call, or the calls of its schedule through a pool."""
    talk = conversation(setup, info)
    try:
        call = next(talk)
        while True:
            call = talk.send(calls.run([call])[0])
    except StopIteration as end:
        ran: Ran = end.value
        return ran


def conversation(setup: Setup, info: KernelInfo) -> Conversation:
    """The calls of a setup, one by one: yields a call, is sent its result, returns what they come to.

    So whoever has many setups can run their calls side by side.
    """
    if setup.life != "prefill":
        lived: Ran = yield from life_conversation(setup, info)
        return lived
    if setup.through_pool:
        return (yield from _through_pool(setup, info))
    call = call_of(setup.case, **setup.options)
    result = yield call
    if result.status != "ok":
        return _unanswered(result, "", 1)
    state = slots.final_states(call.tensors, result.outputs)
    outputs = dict(result.outputs) if state is None else {**result.outputs, "final_state": state}
    fault = shape.check(inputs_of(setup.case), outputs)
    if fault.status == "fires":
        return Ran(status="shape", message=fault.reason, further=(fault,))
    further = (slots.check(call.tensors, outputs),) if "pool" in call.tensors else ()
    return Ran(
        status="ok",
        output=outputs["output"],
        state=outputs["final_state"],
        seconds=result.seconds or 0.0,
        evidence=result.evidence,
        further=further,
    )


def _unanswered(result: RunResult, which: str, calls: int) -> Ran:
    message = result.message or f"the kernel ended with status {result.status}"
    status: Any = result.status
    return Ran(status=status, message=which + message, evidence=result.evidence, calls=calls)


class Pool:
    """The simulated pool of one run, in canonical layout."""

    def __init__(self, setup: Setup, info: KernelInfo) -> None:
        case, plan = setup.case, setup.slots or SlotPlan()
        n = case.n_sequences
        dtype: torch.dtype = getattr(torch, setup.state_dtype or "float32")
        if setup.state_dtype is None and starting_state(case) is not None:
            dtype = starting_state(case).dtype  # type: ignore[union-attr]
        supported = str(dtype).removeprefix("torch.") in info.capabilities.state_dtypes
        self.carried = dtype if supported else torch.float32
        """dtype in which a call is given the states; the pool itself is always rounded to `dtype`."""
        self.dtype, self.padding = dtype, plan.padding
        n_slots = n + SPARE_SLOTS
        self.rows = _filled(case, n_slots, plan, setup.seed).to(dtype)
        # In reverse and from the top, so that neither the order nor the first slot is what a bug expects.
        self.slot_of = torch.arange(n_slots - 1, SPARE_SLOTS - 1, -1) if plan.reversed else torch.arange(n)
        self.started = starts_from_state(case)
        state = starting_state(case)
        if state is not None:
            owned = self.slot_of[self.started]
            self.rows[owned] = state[self.started].to(dtype)
        self.fill = plan.fill

    def tensors(self, numbers: list[int]) -> dict[str, Tensor]:
        """What a call of these sequences is given."""
        chosen = torch.tensor(numbers, dtype=torch.int64)
        flags, at = self.started[chosen], self.slot_of[chosen]
        if self.padding:
            at = torch.cat([at, at.new_full((self.padding,), -1)])
            flags = torch.cat([flags, flags.new_ones(self.padding)])
        return {
            "pool": self.rows.to(self.carried, copy=True),
            "slot_indices": at,
            "has_initial_state": flags,
        }

    def scatter(self, numbers: list[int], states: Tensor) -> None:
        """Write the call's final states back; padded rows own no slot."""
        chosen = torch.tensor(numbers, dtype=torch.int64)
        self.rows[self.slot_of[chosen]] = states[: len(numbers)].cpu().to(self.dtype)
        self.started[chosen] = True

    def states(self) -> Tensor:
        """[N, HV, K, V]: every sequence's row."""
        return self.rows[self.slot_of].clone()

    def in_words(self) -> str:
        spare = f"{len(self.rows) - len(self.slot_of)} slots of nobody hold {self.fill}"
        rows = f", {self.padding} padded row(s) with index -1" if self.padding else ""
        fresh = int((~self.started).sum())
        return f"{len(self.rows)} slots, {spare}, {fresh} sequence(s) start fresh{rows}"


def _filled(case: Case, n_slots: int, plan: SlotPlan, seed: int) -> Tensor:
    """[slots, HV, K, V] float32 as the pool was before the case's sequences took their slots."""
    rows = state_like(case, n_slots, seed=seed + 29)
    if plan.fill == "tenant":
        return rows
    value = {"zeros": 0.0, "nan": float("nan"), "huge": HUGE}[plan.fill]
    return torch.full_like(rows, value)


def _through_pool(setup: Setup, info: KernelInfo) -> Conversation:
    case = rule_only(setup.case)
    pool = Pool(setup, info)
    described = pool.in_words()
    steps = steps_of(case.lengths, setup.split, seed=setup.seed)
    output: Tensor | None = None
    evidence: dict[str, Any] = {}
    further: list[Outcome] = []
    seconds = 0.0
    for number, step in enumerate(steps):
        part, rows = part_of(case, step, pool)
        options = _options(setup, pool)
        call = call_of(part, **options)
        which = f"call {number + 1} of {len(steps)}: " if len(steps) > 1 else ""
        result = yield call
        if result.status != "ok":
            return _unanswered(result, which, number + 1)
        state = slots.final_states(call.tensors, result.outputs)
        returned = dict(result.outputs) if state is None else {**result.outputs, "final_state": state}
        fault = shape.check(inputs_of(part), returned)
        if fault.status == "fires":
            fault = msgspec.structs.replace(fault, reason=which + fault.reason)
            return Ran(status="shape", message=fault.reason, further=(fault,), calls=number + 1)
        further.append(slots.check(call.tensors, returned))
        pool.scatter([s for s, _, _ in step], returned["final_state"])
        got = returned["output"]
        if output is None:
            output = torch.zeros(case.n_tokens, *got.shape[1:], dtype=got.dtype, device=got.device)
        output[rows.to(output.device)] = got[: len(rows)]
        seconds += result.seconds or 0.0
        evidence = _merged(evidence, result.evidence)
    if output is None:
        return Ran(status="refused", message="the case has no sequence to call the kernel with")
    evidence |= {
        "simulated_pool": described,
        "state_kept_in": str(pool.dtype).removeprefix("torch."),
        "calls": len(steps),
    }
    return Ran(
        status="ok", output=output, state=pool.states(), seconds=seconds, evidence=evidence,
        calls=len(steps), further=tuple(o for o in further if o.status != "not-applicable"),
    )  # fmt: skip


def _options(setup: Setup, pool: Pool) -> dict[str, Any]:
    """The call's options; a pool that is not float32 is also asked for by name where the kernel knows it."""
    if setup.state_dtype is None or pool.carried == torch.float32:
        return setup.options
    return {**setup.options, "state_dtype": setup.state_dtype}


def part_of(case: Case, step: Step, pool: Pool) -> tuple[Case, Tensor]:
    """The case of one call, and the packed rows [R] of the whole that it covers.

    Padded rows at the end repeat the call's first token; they are in the part, not among the rows.
    """
    at = starts(case)
    rows = torch.cat([torch.arange(at[s] + a, at[s] + b) for s, a, b in step])
    lengths = [b - a for _, a, b in step]
    taken = rows
    if pool.padding:
        first = rows[:1] if len(rows) else torch.zeros(1, dtype=torch.int64)
        taken = torch.cat([rows, first.repeat(pool.padding)])
        lengths += [1] * pool.padding
    changed: dict[str, Tensor | None] = {name: case[name][taken] for name in PER_TOKEN}
    changed["cu_seqlens"] = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    changed["initial_state"] = None
    changed |= pool.tensors([s for s, _, _ in step])
    return case.with_tensors(**changed), rows


def _merged(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Evidence of several calls: counts add up, lists join, the rest is the last call's."""
    merged = {**before, **now}
    for name, value in now.items():
        old = before.get(name)
        if isinstance(value, bool) or old is None:
            continue
        if (isinstance(value, int) and isinstance(old, int)) or (
            isinstance(value, list) and isinstance(old, list)
        ):
            merged[name] = old + value  # type: ignore[operator]
    return merged
