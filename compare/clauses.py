"""Declared transforms: the slightly different function that a kernel says it computes.

The idea: a transform clause changes the inputs of the truth, never the tolerance. Each kind of transform
is one row of TRANSFORMS; a kernel's contract names it and gives its value. What a departure under such a
clause is called (pass with a contract difference) is for `judge`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..kernels.contract import Clause, Contract
from .inputs import Inputs


def _l2norm_eps(inputs: Inputs, value: Any) -> Inputs:
    return msgspec.structs.replace(inputs, l2norm_eps=float(value)) if inputs.l2norm else inputs


def _alpha_offset(inputs: Inputs, value: Any) -> Inputs:
    """The decay is floored by adding to it: g becomes ln(exp(g) + value)."""
    shifted: Tensor = (inputs.g.double().exp() + float(value)).log()
    return msgspec.structs.replace(inputs, g=shifted)


def _beta_dtype(inputs: Inputs, value: Any) -> Inputs:
    dtype = getattr(torch, str(value))
    return msgspec.structs.replace(inputs, beta=inputs.beta.to(dtype).to(inputs.beta.dtype))


def _beta_logit(inputs: Inputs, value: Any) -> Inputs:
    """A kernel that makes beta itself is handed the logit, in bfloat16, that comes nearest to it."""
    from ..kernels.layouts import beta_through_logit

    return msgspec.structs.replace(inputs, beta=beta_through_logit(inputs.beta)[1])


# Clause id -> what it does to the inputs of the truth.
TRANSFORMS: dict[str, Callable[[Inputs, Any], Inputs]] = {
    "l2norm.eps": _l2norm_eps,
    "gate.alpha-offset": _alpha_offset,
    "beta.dtype": _beta_dtype,
    "beta.logit": _beta_logit,
}


def transforms_of(contract: Contract) -> tuple[Clause, ...]:
    """The clauses of a contract that change the function, in the contract's order."""
    return tuple(c for c in contract.clauses if c.kind == "transform" and c.id in TRANSFORMS)


def under(inputs: Inputs, clauses: tuple[Clause, ...]) -> Inputs:
    """The inputs as the clauses would have the truth see them."""
    for clause in clauses:
        inputs = TRANSFORMS[clause.id](inputs, clause.value)
    return inputs


def changes_anything(inputs: Inputs, clause: Clause) -> bool:
    """Whether a clause touches this case at all (an l2norm eps does not where q and k come normalised)."""
    changed = under(inputs, (clause,))
    return any(getattr(changed, f) is not getattr(inputs, f) for f in inputs.__struct_fields__)
