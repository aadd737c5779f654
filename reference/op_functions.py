"""Which function an operation around the rule computes: the pure one, and what kernels declare instead.

The idea: a kernel's eps, its threshold or its order of gate and norm is a parameter of the function, not a
tolerance; so truth and emulation take the same frozen value, whose defaults are the pure function of the
design (section 3). Where a parameter is from is said in the contract that sets it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EpsPlace = Literal["inside", "outside", "clamp", "none"]


@dataclass(frozen=True)
class Conv:
    """conv: SiLU or nothing behind the sum."""

    activation: Literal["silu", None] = "silu"
    stale_state: bool = False
    """The state is left as it was found (no sound kernel)."""


@dataclass(frozen=True)
class L2Norm:
    """l2norm of q and k."""

    eps: float = 1e-6
    place: EpsPlace = "inside"
    """`inside` the root: x / sqrt(sum + eps); `outside`: x / (sqrt(sum) + eps); `clamp`: x / max(sqrt(sum),
    eps), as torch.nn.functional.normalize has it; `none`: x as it is (no sound kernel)."""


@dataclass(frozen=True)
class Gate:
    """g and beta."""

    threshold: float | None = None
    """From where softplus(x) is taken to be x; None: nowhere. 20 (torch's) changes less than 3e-9."""
    log1p: bool = True
    """log1p(exp(x)), or log(1 + exp(x)), which loses what 1 + exp(x) rounds away. The same function; only
    the emulation tells them apart."""
    sigmoid: bool = True
    """beta = sigmoid(b); False: b itself (no sound kernel)."""


@dataclass(frozen=True)
class Norm:
    """The gated RMSNorm."""

    eps: float = 1e-6
    gate: Literal["after", "before", "none"] = "after"
    """norm(x) * weight * silu(z), or norm(x * silu(z)) * weight; `none`: no gate (no sound kernel)."""
    weight_offset: float = 0.0
    """1 where a weight is stored less one."""
