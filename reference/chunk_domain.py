"""Where the float64 chunk form is provably the recurrence's result.

A chunk of one value head is in the domain if, with S its state at the start:

1. q, k, v, g, beta, scale and S are finite, g = -inf excepted.
2. g <= 0 and beta >= 0, and the product over the chunk of max(1, a_t |1 - beta_t |k_t|^2|), a_t the largest
   exp(g_t) of the key channels, is at most 16. beta |k|^2 <= 2 makes every factor 1; the rest of the
   room is for keys that rounding left a little longer than 1.
3. |q|, |k|, beta, scale <= 1e25 and |v|, |S| <= 1e100, entry by entry.
4. No token with beta |k|^2 > 0 has a max|v_t| below a 1000th of max|S| max|k| or of an earlier max|v_j| of
   the chunk, unless the chunk's writes together can erase less than a factor 1000.

Why this is enough. The exact step S -> a (I - beta k k^T) S has norm max(a, a |1 - beta |k|^2|), so by 2
|S_t| <= 16 B_t, with B_t = a_t B_{t-1} + beta_t |k_t| |v_t| and B_0 = |S|_F, and so do the products of any
steps in between. Column j of T holds the writes that a single write at token j calls forth later, so
|T_ij| <= 16 beta_i |k_i| |k_j| (a_{j+1} ... a_i); each write is at most beta_t (|v_t| + 16 |k_t| B_t). With 3
every product then stays below 1e300: nothing overflows, and what underflows is lost in both forms. One
rounding in the chunk form is a perturbation of one write u_i by at most some C eps times its bound,
that is of the state by C eps beta_i |k_i|^2 B_i or less, which later steps do not amplify (2). So the two
forms differ by O(C^2 eps) B_t. B counts what was written and not what was erased since: 4 keeps it within
a constant of what the chunk writes at each token, else the rounding of something large would outlive its
overwriting by something small (the recurrence corrects that at the next token). Decay between two tokens is
exact to an ulp of its exponent (`decay`), and exp(g) = 0 with a finite S is a reset in both forms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .chunk import PieceInputs

LARGEST_FACTOR = 1e25
LARGEST_CONTENT = 1e100
LARGEST_GROWTH = math.log(16.0)
LARGEST_RANGE = 1e3


@dataclass(frozen=True)
class Magnitudes:
    """Sizes of each chunk and value head that the conditions speak of, all [M, HV].

    NaN where an input that they measure is."""

    key: Tensor
    """Largest |k| of a token."""
    content: Tensor
    """Largest entry of |v|."""
    floor: Tensor
    """Smallest max|v_t| of a token that writes or erases; inf where none does."""
    even: Tensor
    """Bool: no such max|v_t| is below a 1000th of an earlier one (condition 4 within the chunk)."""
    growth: Tensor
    """Natural log of condition 2's product."""
    erased: Tensor
    """Natural log of the factor by which the writes can shrink a state; inf for a perfect overwrite."""

    def at(self, chunk: Tensor, head: Tensor) -> Magnitudes:
        """The same for chosen (chunk, value head) pairs, [R]."""
        return Magnitudes(**{name: y[chunk, head] for name, y in vars(self).items()})


def largest_entry(x: Tensor) -> Tensor:
    """max |x| over the last two dimensions, without a copy of x; NaN if any entry is."""
    flat = x.flatten(-2)
    return torch.maximum(flat.amax(-1), flat.amin(-1).neg_())


def magnitudes(x: PieceInputs) -> Magnitudes:
    """Measure one piece."""
    shared = x.v.shape[1] // x.k.shape[1]
    squares = x.k.square().sum(-1)
    if shared > 1:
        squares = squares.repeat_interleave(shared, 1)
    strength = x.beta * squares
    g = x.g.amax(-1) if x.g.dim() == 4 else x.g
    reflected = (strength - 1.0).abs_().clamp_min_(1e-300).log_()
    erased = reflected.clamp_max(0.0).neg_().sum(-1)
    # Below 1 nothing is reflected beyond its size, however much is kept.
    growth = torch.where(strength > 2.0, g + reflected, torch.zeros_like(g) * strength)
    growth = growth.clamp_min_(0.0).sum(-1)
    values = torch.maximum(x.v.amax(-1), x.v.amin(-1).neg_())
    idle = strength == 0.0
    return Magnitudes(
        key=squares.amax(-1).sqrt(),
        content=values.amax(-1),
        floor=values.masked_fill(idle, math.inf).amin(-1),
        even=((values.cummax(-1).values <= LARGEST_RANGE * values) | idle).all(-1),
        growth=growth,
        erased=erased,
    )


def inputs_fit(x: PieceInputs, sizes: Magnitudes, scale: float) -> Tensor:
    """Conditions 1 to 3 as far as the inputs decide them: [M, HV] bool. A NaN fails every comparison."""
    shared = x.v.shape[1] // x.k.shape[1]
    queries = largest_entry(x.q) <= LARGEST_FACTOR
    g = x.g.flatten(2).amax(-1)
    fit = (sizes.key <= LARGEST_FACTOR) & (sizes.growth <= LARGEST_GROWTH)
    fit &= queries.repeat_interleave(shared, 1) if shared > 1 else queries
    fit &= (g <= 0.0) & (x.beta.amin(-1) >= 0.0) & (x.beta.amax(-1) <= LARGEST_FACTOR)
    fit &= sizes.content <= LARGEST_CONTENT
    return fit if abs(scale) <= LARGEST_FACTOR else torch.zeros_like(fit)


def states_fit(sizes: Magnitudes, states: Tensor) -> Tensor:
    """Conditions 1, 3 and 4 on the states [..., K, V] at the chunks' starts, beside sizes [...]: bool."""
    largest = largest_entry(states)
    in_range = sizes.even & (largest * sizes.key <= LARGEST_RANGE * sizes.floor)
    in_range |= sizes.erased <= math.log(LARGEST_RANGE)
    return (largest <= LARGEST_CONTENT) & in_range
