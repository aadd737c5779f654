"""What both emulations take: the packed call, checked at the door.

The idea: an emulation that guesses is worse than none, so a shape that does not fit is refused with the
numbers before anything is computed. Values are not judged here: NaN goes through as in a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

L2NORM_EPS = 1e-6
"""Inside the root; fla-core 0.4.0 and 0.6.0 and transformers 5.24.0 alike."""


@dataclass(frozen=True)
class Inputs:
    """A checked packed call; see `checked_inputs` for the shapes."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    starts: list[int]
    lengths: list[int]
    scale: float

    @property
    def tokens(self) -> int:
        return self.v.shape[0]

    @property
    def hv(self) -> int:
        return self.v.shape[1]

    @property
    def dk(self) -> int:
        return self.k.shape[2]

    @property
    def dv(self) -> int:
        return self.v.shape[2]

    @property
    def groups(self) -> int:
        """Value heads that read one key head."""
        return self.hv // self.k.shape[1]


def checked_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
) -> Inputs:
    """The call with its sequences listed; ValueError with the offending numbers where it does not fit.

    q, k: [T, HK, K], v: [T, HV, V], g, beta: [T, HV], initial_state: [N, HV, K, V], cu_seqlens: [N+1].
    """
    if q.ndim != 3 or q.shape != k.shape:
        raise ValueError(f"q and k must share a shape [T, HK, K], not {list(q.shape)} and {list(k.shape)}")
    if v.ndim != 3 or v.shape[0] != q.shape[0]:
        raise ValueError(f"v must be [T, HV, V] with T = {q.shape[0]}, not {list(v.shape)}")
    tokens, hk, dk = q.shape
    hv, dv = v.shape[1:]
    if hk == 0 or hv % hk:
        raise ValueError(
            f"{hv} value heads cannot be shared among {hk} key heads; HV must be a multiple of HK"
        )
    for name, x in (("g", g), ("beta", beta)):
        if tuple(x.shape) != (tokens, hv):
            raise ValueError(
                f"{name} must be [T, HV] = [{tokens}, {hv}], not {list(x.shape)}: one value per head"
            )
    bounds = [0, tokens] if cu_seqlens is None else [int(b) for b in cu_seqlens.tolist()]
    lengths = [b - a for a, b in pairwise(bounds)]
    if not bounds or bounds[0] != 0 or bounds[-1] != tokens or any(n < 0 for n in lengths):
        raise ValueError(f"cu_seqlens must rise from 0 to T = {tokens}, not {bounds[:4]}...{bounds[-1:]}")
    if initial_state is not None and tuple(initial_state.shape) != (len(lengths), hv, dk, dv):
        raise ValueError(
            f"initial_state must be [N, HV, K, V] = [{len(lengths)}, {hv}, {dk}, {dv}], "
            f"not {list(initial_state.shape)}"
        )
    factor = float(dk) ** -0.5 if scale is None else float(scale)
    return Inputs(q, k, v, g, beta, initial_state, bounds[:-1], lengths, factor)


def l2norm_of(x: Tensor, eps: float = L2NORM_EPS) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, by the reciprocal as in FLA, in x's dtype."""
    return x * (1.0 / torch.sqrt((x * x).sum(-1, keepdim=True) + eps))
