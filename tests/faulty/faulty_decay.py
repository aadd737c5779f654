"""Faults of the gate: its space, its sums, its boundaries, and guards that zero what is valid."""

from __future__ import annotations

import math

import torch
from faulty_model import Fault, Spot


def where_equal(value, run):
    """A guard that takes a difference of zero for a masked one."""
    return torch.where(run.cumsum[:, :, None] == run.cumsum[:, None, :], 0.0, value)


def where_equal_off_the_diagonal(value, run):
    same = run.cumsum[:, :, None] == run.cumsum[:, None, :]
    return torch.where(same & ~torch.eye(run.length, dtype=torch.bool), 0.0, value)


def over_the_chunk(value, run):
    """The sum of the chunk before is still in the register."""
    carried = run.memory.get("total", 0.0) if run.chunk else 0.0
    total = value + carried
    run.memory["total"] = total[:, -1:]
    return total


def over_the_sequence(value, run):
    carried = run.memory.pop("total", None) if not run.chunk and run.sequence else None
    total = value if carried is None else value + carried
    if run.closes:
        run.memory["total"] = total[:, -1:]
    return total


def factored(value, run):
    total = run.cumsum
    return total.exp()[:, :, None] * (-total).exp()[:, None, :]


def shifted(by):
    """Gates of another token, inside the whole packed call."""

    def edit(call, run):
        call.g = call.g.roll(by, 0)
        return call

    return edit


def changed(function):
    def edit(call, run):
        call.g = function(call.g.float())
        return call

    return edit


def clamped_differences(floor):
    """exp of a difference is kept above a floor."""
    return lambda value, run: (run.cumsum[:, :, None] - run.cumsum[:, None, :]).clamp(min=floor).exp()


DECAY = {
    "decay_of_the_next_token": Fault({"inputs": shifted(-1)}),
    "decay_of_the_token_before": Fault({"inputs": shifted(1)}),
    "decay_of_another_head": Fault({"g": lambda g, run: g.roll(1, 0)}),
    "decay_ignored": Fault({"inputs": changed(torch.zeros_like)}),
    "gate_taken_as_base_two": Fault({"inputs": changed(lambda g: g * math.log(2))}),
    "gate_taken_as_linear": Fault({"decay": lambda d, run: d.log()}, base="recurrent"),
    "gate_minus_its_exponential": Fault({"decay": lambda d, run: 1 + d.log()}, base="recurrent"),
    "decay_twice_at_a_boundary": Fault({"kept": lambda d, run: d.square()}, spot=Spot(sequences=(0, 2, 3))),
    "decay_missing_at_a_boundary": Fault(
        {"kept": lambda d, run: torch.ones_like(d)}, spot=Spot(sequences=(0, 2, 3))
    ),
    "decay_missing_on_the_old_state_in_o": Fault(
        {"o": lambda o, run: o + run.q @ run.h * (1 - run.growth[..., None]) * run.scale},
        stage="output",
        spot=Spot(tensors=("output",)),
    ),
    "cumsum_excludes_its_own_token": Fault({"cumsum": lambda x, run: x - run.g}, stage="cumsum"),
    "cumsum_carried_over_a_chunk": Fault(
        {"cumsum": over_the_chunk}, stage="cumsum", spot=Spot(sequences=(0, 3), tokens=lambda t: t >= 64)
    ),
    "cumsum_carried_over_a_sequence": Fault(
        {"cumsum": over_the_sequence}, stage="cumsum", spot=Spot(sequences=(2, 3)), tiers=(0, 1, 2, 3, 4)
    ),
    "cumsum_in_bfloat16": Fault(
        {"cumsum": lambda x, run: x.bfloat16().float()}, cases=("packed", "fp32"), stage="cumsum"
    ),
    "left_decay_to_the_chunk_size": Fault(
        # The last sum is read at the chunk's full length: a partial chunk has 0 there.
        {"left": lambda x, run: x if run.length == run.size else (-run.cumsum).exp()},
        spot=Spot(sequences=(0, 2, 3)),
    ),
    "guard_zeroes_a_gate_of_one": Fault({"decay": where_equal}, cases=("packed", "no-decay")),
    "guard_zeroes_a_gate_of_one_off_the_diagonal": Fault(
        {"decay": where_equal_off_the_diagonal}, cases=("no-decay",)
    ),
    "guard_zeroes_growth_of_one": Fault(
        {"growth": lambda x, run: torch.where(x == 1.0, 0.0, x)}, cases=("no-decay",)
    ),
    "guard_clamps_the_differences": Fault({"decay": clamped_differences(-2.0)}, cases=("tiny-decay",)),
    "exponential_factored": Fault(
        {"decay": factored},
        cases=("tiny-decay",),
        tiers=(1,),
        spot=Spot(classes=("nan", "+inf", "-inf", "wrong")),
    ),
    "reset_gives_nan": Fault(
        {},
        cases=("minus-inf",),
        verdict="out-of-contract",
        tiers=(1,),
        says="-Inf",
        spot=Spot(tensors=("output", "state")),
    ),
    "reset_promised_gives_nan": Fault(
        {},
        cases=("minus-inf",),
        tiers=(1,),
        clauses={"gate.inf": "-inf is a reset"},
        spot=Spot(classes=("nan",)),
    ),
}
