"""The token loop of the gated delta rule with a kernel's own rounding.

The idea: a recurrent kernel rounds in few places, and only one of them adds up: the format its state is
kept in between tokens. So the loop is plain float32 (FLA's fused_recurrent: float32 registers, elementwise
sums) with the cast points `l2norm`, `beta`, `u`, `state`, `output`, `final_state`; a `state` of bf16 or fp16
is the engine that writes its slot after each token.

Left to others: everything that `emulation` leaves to others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .emulation import EmulationResult
from .emulation_arithmetic import Arithmetic, ieee_matmul
from .emulation_inputs import L2NORM_EPS, Inputs, checked_inputs, l2norm_of
from .precision import Precision, precision_for
from .variants import Variant


def emulate_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    precision: Precision | str = "fla-recurrent",
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    l2norm: bool = False,
    l2norm_eps: float = L2NORM_EPS,
    variant: Variant | None = None,
    generator: torch.Generator | None = None,
) -> EmulationResult:
    """Run the recurrence token by token as a kernel with this precision would; all sequences at once.

    Arguments and errors as in `emulation.emulate_chunk`; there are no stages. The format of the state
    after each token is the cast point `state`: `precision.with_casts(state="bf16")`.
    """
    if isinstance(precision, str):
        precision = precision_for(precision, device=q.device.type)
    inputs = checked_inputs(q, k, v, g, beta, initial_state, cu_seqlens, scale)
    arithmetic = Arithmetic(
        precision, native=q.dtype, beta=beta.dtype, device=q.device, variant=variant, generator=generator
    )
    with torch.no_grad(), ieee_matmul():
        return _loop(inputs, arithmetic, l2norm_eps if l2norm else None)


def _loop(x: Inputs, a: Arithmetic, l2norm_eps: float | None) -> EmulationResult:
    output = a.zeros(x.tokens, x.hv, x.dv)
    state = a.zeros(len(x.lengths), x.hv, x.dk, x.dv)
    if x.initial_state is not None:
        state = a.cast("handover", a.enter(x.initial_state))
    q, k, v, beta = a.enter(x.q), a.enter(x.k), a.enter(x.v), a.cast("beta", a.enter(x.beta))
    decay = a.enter(x.g).exp()
    if l2norm_eps is not None:
        q, k = (a.cast("l2norm", l2norm_of(y, l2norm_eps)) for y in (q, k))
    # Longest first: the sequences that still run at step t are then a prefix, and a slice is a view.
    by_length = sorted(range(len(x.lengths)), key=lambda n: -x.lengths[n])
    order = torch.tensor(by_length, dtype=torch.int64, device=x.q.device)
    starts = torch.tensor([x.starts[n] for n in by_length], dtype=torch.int64, device=x.q.device)
    state = state[order]
    running = len(by_length)
    for t in range(max(x.lengths, default=0)):
        while x.lengths[by_length[running - 1]] <= t:
            running -= 1
        rows = starts[:running] + t
        key, query = (z[rows].repeat_interleave(x.groups, dim=1)[..., None, :] for z in (k, q))
        s = state[:running] * decay[rows][..., None, None]
        error = v[rows][..., None, :] - a.dot("h", key, s)
        u = a.cast("u", error * beta[rows][..., None, None])
        s = a.cast("state", s + key.mT * u)
        state[:running] = s
        output[rows] = a.cast("output", a.dot("qh", query * x.scale, s)[..., 0, :])
    final = torch.empty_like(state)
    final[order] = a.cast("final_state", state)
    return EmulationResult(output, final)
