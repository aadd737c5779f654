"""Twists: changes of a case that strain one thing, each inside the rule's domain.

The idea: a family strains every token alike; a twist puts the strain at one token (next to a chunk's edge,
as a rule), in one head, or at one scale. Each keeps g <= 0, beta in 0..1 and |k| as it was, so that a verdict
on the kernel remains possible. Exact cases are never twisted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .dice import Dice
from .recipe import Twist

Tensors = dict[str, Tensor]
Change = Callable[[Tensors, slice, slice, int, float], None]
"""(tensors, rows of the sequence, value heads, token's row, size); changes the tensors in place."""

# The most that one token may forget: exp(-1e4) is zero anywhere, and its sums stay exact in float32.
STRONGEST = -1e4


def _rows(x: Tensor, rows: slice, heads: slice) -> Tensor:
    """A view of some rows and heads; of q and k the heads that these value heads read."""
    return x[rows, heads]


def _gate_spike(t: Tensors, rows: slice, heads: slice, at: int, size: float) -> None:
    """One token forgets nearly all: exp(-size)."""
    t["g"][at, heads] = max(-abs(size), STRONGEST)


def _gate_sum(t: Tensors, rows: slice, heads: slice, at: int, size: float) -> None:
    """A constant decay whose sum over a chunk of 64 is -size: next to where exp over- or underflows."""
    t["g"][rows, heads] = -abs(size) / 64


def _gate_scale(t: Tensors, rows: slice, heads: slice, at: int, size: float) -> None:
    """All decays times a factor."""
    g = _rows(t["g"], rows, heads)
    g.mul_(abs(size)).clamp_(min=STRONGEST)


def _gate_none(t: Tensors, rows: slice, heads: slice, at: int, size: float) -> None:
    """Nothing is forgotten."""
    t["g"][rows, heads] = 0.0


def _beta_one(t: Tensors, rows: slice, heads: slice, at: int, size: float) -> None:
    """Every token is written in full."""
    t["beta"][rows, heads] = 1.0


def _beta_high(t: Tensors, rows: slice, heads: slice, at: int, size: float) -> None:
    """beta in 0.9..1, in the old order of sizes."""
    beta = _rows(t["beta"], rows, heads)
    beta.copy_((0.9 + 0.1 * beta.float().clamp(0, 1)).to(beta.dtype))


def _beta_token(t: Tensors, rows: slice, heads: slice, at: int, size: float) -> None:
    """One token is not written at all."""
    t["beta"][at, heads] = 0.0


def _same_key(t: Tensors, rows: slice, heads: slice, at: int, size: float) -> None:
    """The keys of 16 tokens from here on are one key."""
    until = min(at + 16, rows.stop)
    t["k"][at:until] = t["k"][at].clone()


def _zero_key(t: Tensors, rows: slice, heads: slice, at: int, size: float) -> None:
    """One key is zero: nothing is written or read there."""
    t["k"][at] = 0.0


def _negated_keys(t: Tensors, rows: slice, heads: slice, at: int, size: float) -> None:
    """Keys turn their sign at every other token: A has entries of both signs."""
    t["k"][rows.start + 1 : rows.stop : 2].neg_()


def _scale_values(t: Tensors, rows: slice, heads: slice, at: int, size: float) -> None:
    """v times a power of two."""
    v = _rows(t["v"], rows, heads)
    v.mul_(2.0 ** round(size))


def _scale_token(t: Tensors, rows: slice, heads: slice, at: int, size: float) -> None:
    """The value of one token times a power of two."""
    t["v"][at, heads] *= 2.0 ** round(size)


def _scale_state(t: Tensors, rows: slice, heads: slice, at: int, size: float) -> None:
    """Initial states times a power of two."""
    if "initial_state" in t:
        t["initial_state"][:, heads] *= 2.0 ** round(size)


def _silent(t: Tensors, rows: slice, heads: slice, at: int, size: float) -> None:
    """Zero queries from a token on."""
    t["q"][at : rows.stop] = 0.0


class Kind(NamedTuple):
    """One row of TWISTS."""

    change: Change
    size: Callable[[Dice], float]


def _nothing(dice: Dice) -> float:
    return 0.0


def _power(dice: Dice) -> float:
    return float(dice.one_of((-12, -6, -3, -1, 1, 3, 6)))


TWISTS: dict[str, Kind] = {
    "gate-spike": Kind(_gate_spike, lambda dice: dice.one_of((5.0, 20.0, 88.0, 104.0, 745.0, 1000.0))),
    "gate-sum": Kind(
        _gate_sum, lambda dice: dice.one_of((80.0, 87.0, 88.5, 89.0, 103.0, 104.5, 127.0, 180.0, 709.0))
    ),
    "gate-scale": Kind(_gate_scale, lambda dice: math.exp(dice.uniform(-5.0, 5.0))),
    "gate-none": Kind(_gate_none, _nothing),
    "beta-one": Kind(_beta_one, _nothing),
    "beta-high": Kind(_beta_high, _nothing),
    "beta-token": Kind(_beta_token, _nothing),
    "same-key": Kind(_same_key, _nothing),
    "zero-key": Kind(_zero_key, _nothing),
    "negated-keys": Kind(_negated_keys, _nothing),
    "scale-values": Kind(_scale_values, _power),
    "scale-token": Kind(_scale_token, _power),
    "scale-state": Kind(_scale_state, _power),
    "silent": Kind(_silent, _nothing),
}
# Tokens next to which kernels change what they do: chunks, their sub-blocks, ends.
EDGES = (0, 1, 15, 16, 17, 31, 32, 48, 62, 63, 64, 65, 127, 128, 129, -2, -1)


def draw_twist(dice: Dice, n_sequences: int, heads: int) -> Twist:
    """A twist for a case of so many sequences and value heads."""
    name = dice.one_of(tuple(TWISTS))
    sequence = -1 if dice.chance(0.5) else dice.between(0, n_sequences - 1)
    head = -1 if dice.chance(0.6) else dice.between(0, heads - 1)
    return Twist(name, sequence, head, dice.one_of(EDGES), TWISTS[name].size(dice))


def apply_twist(twist: Twist, tensors: Tensors, edges: list[int]) -> None:
    """Make a twist, in place. edges: cu_seqlens."""
    heads = tensors["v"].shape[1]
    chosen = slice(None) if twist.head < 0 else slice(twist.head % heads, twist.head % heads + 1)
    n = len(edges) - 1
    for i in range(n) if twist.sequence < 0 else (twist.sequence % n,):
        length = edges[i + 1] - edges[i]
        if length:
            rows = slice(edges[i], edges[i + 1])
            TWISTS[twist.name].change(tensors, rows, chosen, edges[i] + twist.at % length, twist.size)
        if twist.name == "scale-state":
            break  # it is made in all sequences at once


def largest(tensors: Tensors) -> float:
    """Largest magnitude among values and states."""
    return max(
        (
            float(tensors[n].abs().max())
            for n in ("v", "initial_state")
            if n in tensors and tensors[n].numel()
        ),
        default=0.0,
    )


def is_safe(tensors: Tensors) -> bool:
    """Whether nothing that a kernel of this dtype must hold is near its largest number."""
    limit = 64.0 if tensors["v"].dtype == torch.float16 else 1e6
    return largest(tensors) <= limit
