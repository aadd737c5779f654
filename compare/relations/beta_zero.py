"""Beta zero: with nothing to learn, the state only decays.

Statement. With beta = 0, S_t = exp(g_1 + ... + g_t) S_0 and o_t = scale S_t^T q_t, whatever k and v are: a
closed form that needs neither recurrence nor chunks. Held up to the rounding of operands, decays and results.
A case without initial states gets random ones for this call.
Exercised by the rows that are not zero in the closed form.
Fires on: a write that beta does not gate, a decay applied twice or not at all, a state of another sequence.
Silent on: g = -inf, which only some kernels take (not applicable).
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import torch
from torch import Tensor

from ...kernels.interface import RunResult
from ...reference.bounds import smallest_error
from ...reference.l2norm import l2norm
from ...reference.precision import precision_for
from ...reference.rounding import FORMATS
from ..inputs import Inputs
from ..nonfinite import place_of_row
from ..report_words import number, where
from ..tiles import unit_roundoff
from ..trial import Trial
from ..verdict import Outcome
from .expectation import Expectation, Plan, no_rows
from .perturb import generator

NAME, TIER = "beta-zero", 4
# Roundings that a result may carry, norm-wise: of q, of the stored state, of the product, of the store.
OPERAND_ROUNDINGS = 8.0
DECAY_ROUNDINGS = 8.0


def plan(inputs: Inputs, *, seed: int) -> Plan:
    """One call with beta = 0."""
    if inputs.n_tokens == 0:
        return "the case has no tokens"
    if not bool(torch.isfinite(inputs.g).all()):
        return "g is not finite everywhere"
    state = inputs.initial_state
    if state is None or not bool((state != 0).any()):
        shape = (inputs.n_sequences, inputs.heads, inputs.q.shape[-1], inputs.v.shape[-1])
        state = torch.randn(shape, generator=generator(seed, 351)).to(inputs.device)
    changed = msgspec.structs.replace(inputs, beta=torch.zeros_like(inputs.beta), initial_state=state)

    def judge(trial: Trial, result: RunResult) -> Outcome:
        return compare_with_decay(trial, changed, result)

    return [
        Expectation(
            relation=NAME,
            inputs=changed,
            what="beta = 0",
            verb="everywhere",
            output_rows=no_rows(inputs.device),
            state_rows=no_rows(inputs.device),
            judge=judge,
            # A pool may hold other states than these.
            same_shape=inputs.initial_state is state,
        )
    ]


def pure_decay(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The closed form in float64: output [T, HV, V], final state [N, HV, K, V], and two sizes of the outputs.

    Sizes, [T, HV]: scale |q_t|, and scale |q_t| |S_t|_F.
    """
    assert inputs.initial_state is not None
    cu = inputs.cu_seqlens.tolist()
    start = inputs.initial_state.double()
    q = inputs.q.double()
    q = l2norm(q, inputs.l2norm_eps) if inputs.l2norm else q
    q = q.repeat_interleave(inputs.heads // q.shape[1], dim=1)
    output = torch.zeros(*inputs.v.shape, dtype=torch.float64, device=inputs.device)
    size = torch.zeros(inputs.n_tokens, inputs.heads, dtype=torch.float64, device=inputs.device)
    final = start.clone()
    for n, (a, b) in enumerate(pairwise(cu)):
        if a == b:
            continue
        total = inputs.g[a:b].double().cumsum(0)
        if total.ndim == 3:
            decayed_q = q[a:b] * total.exp()
            final[n] = start[n] * total[-1].exp()[..., None]
            norm = torch.linalg.vector_norm(start[n].flatten(1), dim=-1) * total.amax(-1).exp()
        else:
            decayed_q = q[a:b] * total.exp()[..., None]
            final[n] = start[n] * total[-1].exp()[:, None, None]
            norm = torch.linalg.vector_norm(start[n].flatten(1), dim=-1) * total.exp()
        output[a:b] = inputs.scale * torch.einsum("thk,hkv->thv", decayed_q, start[n])
        size[a:b] = norm
    reads = abs(inputs.scale) * torch.linalg.vector_norm(q, dim=-1)
    return output, final, reads, reads * size


def compare_with_decay(trial: Trial, inputs: Inputs, result: RunResult) -> Outcome:
    """Norm-wise, row by row: outputs first."""
    output, final, reads, size = pure_decay(inputs)
    state_size = torch.linalg.vector_norm(final.flatten(2), dim=-1)
    lengths = inputs.cu_seqlens.diff()
    # Log decays summed so far, and roundings of the carried state, both in float32 at least.
    g = inputs.g.double().abs()
    g = g.amax(-1) if g.ndim == 3 else g
    summed = torch.zeros(inputs.n_sequences, inputs.heads, dtype=torch.float64, device=inputs.device)
    sequence = torch.repeat_interleave(torch.arange(inputs.n_sequences, device=inputs.device), lengths)
    summed.index_add_(0, sequence, g)
    decay = (
        DECAY_ROUNDINGS * 2.0**-24 * (4 + summed) + _state_roundoff(trial) * (4 + lengths.double())[:, None]
    )
    got, state = result.outputs["output"].to(inputs.device), result.outputs.get("final_state")
    operand = OPERAND_ROUNDINGS * max(trial.roundoffs.operand, unit_roundoff(got.dtype))
    limit = size * (operand + decay[sequence]) + _lost(inputs, got, reads)
    found = _first_above(got, output, limit)
    tiles = trial.witness.output_tiles(trial.capabilities_chunk)
    name = "output"
    if found is None and state is not None:
        state = state.to(inputs.device)
        limit = state_size * (decay + 2 * unit_roundoff(state.dtype)) + _lost(inputs, state, None)
        found, tiles, name = _first_above(state, final, limit), trial.witness.state_tiles, "state"
    exercised = int((size > 0).sum())
    if found is None:
        return Outcome(check=NAME, tier=TIER, status="ok", numbers={"exercised": exercised})
    row, head, error, allowed = found
    place = place_of_row(tiles, row, head, "wrong")
    reason = (
        f"{NAME}: with beta = 0 {name} is not the decayed initial state at {where(place)}: off by "
        f"{number(error)} in norm, {number(allowed)} is what rounding explains"
    )
    numbers = {"exercised": exercised, "error": error, "limit": allowed, "would_pass": {"limit": error}}
    return Outcome(check=NAME, tier=TIER, status="fires", reason=reason, place=place, numbers=numbers)


def _state_roundoff(trial: Trial) -> float:
    """Of the state as it is carried from chunk to chunk (token to token)."""
    inputs = trial.witness.inputs
    precision = precision_for(trial.profile, device=trial.device_type, chunk_size=trial.capabilities_chunk)
    kept = [FORMATS[precision.at(point, inputs.v.dtype)].unit_roundoff for point in ("state", "handover")]
    return max(2.0**-24, *kept, trial.roundoffs.stored_state)


def _lost(inputs: Inputs, got: Tensor, reads: Tensor | None) -> Tensor:
    """[T, HV] or [N, HV]: what underflows on the way, norm-wise; absolute, and relative to nothing.

    Entries of the result; of the state as an operand; a factor exp(G) that is subnormal itself, which a
    machine may flush to zero. reads: scale |q_t| for outputs, None for states.
    """
    assert inputs.initial_state is not None
    key, value = inputs.q.shape[-1], inputs.v.shape[-1]
    start = torch.linalg.vector_norm(inputs.initial_state.flatten(2).double(), dim=-1)
    stored, decay = smallest_error(got.dtype), smallest_error(torch.float32)
    if reads is None:
        of_state: Tensor = 2 * decay * start + stored * float(key * value) ** 0.5
        return of_state
    largest = start.amax(0) if len(start) else start.sum(0)
    operand = 2 * smallest_error(inputs.v.dtype) * float(key * value) ** 0.5
    of_output: Tensor = reads * (operand + 2 * decay * largest) + stored * float(value) ** 0.5
    return of_output


def _first_above(got: Tensor, want: Tensor, limit: Tensor) -> tuple[int, int, float, float] | None:
    error = torch.linalg.vector_norm((got.double() - want).flatten(2), dim=-1)
    bad = ~(error <= limit)
    if not bool(bad.any()):
        return None
    row, head = bad.nonzero()[0].tolist()
    return row, head, float(error[row, head]), float(limit[row, head])
