"""Numbered in-domain cases: case i is a function of (seed, i), so a number in a log is a bug report.

The idea: every generator family that lies in the domain, with lengths of 1 to 700 tokens in one call (packed,
empty and one-token sequences among them), 1 to 8 value heads over 1 to as many key heads, all dims, dtypes,
states and state dtypes, drawn by one dice per number. Who runs them is `specificity`'s business.
"""

from __future__ import annotations

import random
from typing import Any

from gdncheck.capture.case import Case
from gdncheck.capture.make import FAMILIES, make

# Outside the domain by construction: there no kernel is blamed, so there is nothing to be specific about.
OUTSIDE = ("forgotten-l2norm",)
IN_DOMAIN = tuple(name for name in FAMILIES if name not in OUTSIDE)
LONGEST = 700
DIMS = (32, 64, 128)
DTYPES = ("bf16", "fp16", "fp32")
STATES = ("none", "zeros", "random", "stale")
# Lengths at which kernels change path: one row, sub-block, chunk, and their neighbours.
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 127, 128, 129, 255, 256, 257)


def arguments(
    number: int, seed: int = 0, *, few_shapes: bool = False, one_shape: bool = False
) -> dict[str, Any]:
    """What `make` is called with for case `number`.

    few_shapes: 4 heads and K = V in {64, 128}, for kernels that compile and tune for every new shape.
    one_shape: 4 heads, K = V = 64, a float32 state in every call, beta in the inputs' dtype: a kernel is
    tuned once per input dtype.
    """
    dice = random.Random(f"specificity {seed} {number}")
    lengths = _lengths(dice)
    value_heads = 4 if few_shapes else dice.randint(1, 8)
    divisors = [n for n in range(1, value_heads + 1) if value_heads % n == 0]
    dims = (dice.choice(DIMS), dice.choice(DIMS))
    if few_shapes:
        dims = (dice.choice((64, 128)),) * 2
    dtype = dice.choice(DTYPES)
    drawn = {
        "family": IN_DOMAIN[number % len(IN_DOMAIN)],
        "lengths": lengths,
        "k_heads": value_heads if few_shapes else dice.choice(divisors),
        "v_heads": value_heads,
        "dims": dims,
        "dtype": dtype,
        "beta_dtype": dice.choice((None, "fp32")),
        "state": _states(dice, len(lengths)),
        "state_dtype": dice.choice(("fp32", "fp32", *DTYPES)),
        "seed": seed * 1_000_003 + number,
    }
    return _in_one_shape(drawn) if one_shape else drawn


def _in_one_shape(drawn: dict[str, Any]) -> dict[str, Any]:
    state = drawn["state"]
    if state == "none" or (isinstance(state, list) and set(state) == {"none"}):
        state = "zeros"
    return drawn | {
        "k_heads": 4, "v_heads": 4, "dims": (64, 64), "beta_dtype": None, "state_dtype": "fp32",
        "state": state,
    }  # fmt: skip


def case_number(number: int, seed: int = 0, *, few_shapes: bool = False, one_shape: bool = False) -> Case:
    """Case `number` of a seed."""
    return make(**arguments(number, seed, few_shapes=few_shapes, one_shape=one_shape))


def _lengths(dice: random.Random) -> list[int]:
    """One sequence half of the time, else up to six; at least one token and at most LONGEST in all."""
    if dice.random() < 0.5:
        return [dice.choice(EDGES) if dice.random() < 0.3 else _log_uniform(dice, LONGEST)]
    left, lengths = LONGEST, []
    for _ in range(dice.randint(2, 6)):
        kind = dice.random()
        wish = 0 if kind < 0.15 else 1 if kind < 0.3 else _log_uniform(dice, 300)
        if kind > 0.7:
            wish = dice.choice(EDGES)
        lengths.append(min(wish, left))
        left -= lengths[-1]
    return lengths if any(lengths) else [*lengths, 1]


def _log_uniform(dice: random.Random, longest: int) -> int:
    return max(1, min(longest, round(longest ** dice.random())))


def _states(dice: random.Random, n_sequences: int) -> str | list[str]:
    """One word for all, or one per sequence."""
    if dice.random() < 0.6:
        return dice.choice(STATES)
    return [dice.choice(STATES) for _ in range(n_sequences)]
