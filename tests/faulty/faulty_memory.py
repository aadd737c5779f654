"""Faults that need more than one call to show: memory from call to call, chance, moving bits."""

from __future__ import annotations

import random

import torch
from faulty_model import STARTS, Fault, Spot

TAIL = STARTS[3] + 128


def first_call_wrong(output, run):
    if run.memory["calls"] == 0:
        output[STARTS[3] :, 1] *= 1.5
    return output


def third_call_wrong(output, run):
    if run.memory["calls"] == 2:
        output[STARTS[3] + 20, 1] = torch.nan
    return output


def gates_of_the_call_before(call, run):
    """A buffer that is refreshed after it is read, if the shape stays."""
    stale = run.memory.get("g")
    run.memory["g"] = call.g.clone()
    if stale is not None and stale.shape == call.g.shape:
        call.g = stale
    return call


def lengths_of_the_call_before(call, run):
    """Chunk indices cached under the number of tokens, whatever the lengths are."""
    call.cu_seqlens = run.memory.setdefault(len(call.v), call.cu_seqlens.clone())
    return call


def stale_tail(output, run):
    """The last rows are never written: they hold what the buffer held, the call before's rows."""
    held = run.memory.get("buffer")
    run.memory["buffer"] = output.clone()
    output[-2:] = 0 if held is None or held.shape != output.shape else held[-2:]
    return output


def fresh_tail(output, run):
    """The last row of the call's last partial tile is never written: it holds what the allocator gave."""
    buffer = torch.empty_like(output)
    buffer[:-1] = output[:-1]
    return buffer


def moving(value, run):
    """One entry moves by an ulp or so from call to call, as sums in any order do."""
    step = 1 + 2.0**-7 * (run.memory["calls"] % 2)
    value[0, -1, 0] *= step
    return value


def moving_state(final, run):
    final[-1, 2, 0, 0] *= 1 + 2.0**-20 * (run.memory["calls"] % 3)
    return final


def sometimes(rate, seed=7):
    """Wrong in one call of 1 / rate, by chance."""

    def edit(output, run):
        dice = run.memory.setdefault("dice", random.Random(seed))
        if dice.random() < rate:
            output[STARTS[3] + 64 :, 2] = torch.nan
        return output

    return edit


MEMORY = {
    "first_call_is_wrong": Fault(
        {"output": first_call_wrong}, tiers=(0, 1, 2, 3, 4), spot=Spot(("output",), (3,), (1,))
    ),
    "third_call_is_wrong": Fault(
        {"output": third_call_wrong},
        tiers=(4,),
        says="run-to-run",
        relations="all",
        spot=Spot(("output",), (3,), (1,), lambda t: t == 20, ("nan", "moves")),
    ),
    "gates_of_the_call_before": Fault({"inputs": gates_of_the_call_before}, tiers=(0, 4)),
    "lengths_of_the_call_before": Fault(
        {"inputs": lengths_of_the_call_before}, cases=("alone",), tiers=(0, 4), relations="all"
    ),
    "last_rows_hold_the_call_before": Fault(
        {"output": stale_tail}, spot=Spot(("output",), (3,), tokens=lambda t: t >= 128)
    ),
    "last_row_holds_fresh_memory": Fault(
        {"output": fresh_tail},
        relations="all",
        tiers=(0, 1, 2, 3, 4),
        spot=Spot(("output",), (3,), tokens=lambda t: t == 129),
    ),
    "one_entry_moves_from_call_to_call": Fault(
        {"o": moving},
        tiers=(4,),
        says="run-to-run",
        relations="all",
        spot=Spot(("output",), classes=("moves",)),
    ),
    "one_state_entry_moves_from_call_to_call": Fault(
        {"final": moving_state},
        tiers=(4,),
        says="run-to-run",
        relations="all",
        spot=Spot(("state",), (3,), (2,), classes=("moves",)),
    ),
    # Found by reruns: `test_repeats.py`.
    "one_call_in_twenty_is_nan": Fault(
        {"output": sometimes(0.05)}, cases=(), tiers=(1,), spot=Spot(("output",), (3,), (2,))
    ),
}
