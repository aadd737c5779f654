"""Prefix state: the state that later tokens read is the final state of the tokens before them.

Statement. K tokens with beta = 0, g = 0 and one-hot queries behind a sequence read its state row by row:
o = scale S[i, :]. What they read is the final state that the case's own call returned, up to the rounding of
the stored state and of the output; and they leave that state as it is.
Exercised by the rows of the state that were read.
Fires on: a returned state that is not the one the kernel goes on with (dropped tail, wrong layout, wrong
sequence, a checkpoint of another token).
Silent on: the rounding of the state as an operand.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import torch
from torch import Tensor

from ...kernels.interface import RunResult
from ...reference.bounds import smallest_error
from ..checks.emulation_ratio import FEW_ROUNDINGS, RMS_LIMIT
from ..inputs import Inputs, take_sequences
from ..report_words import number, where
from ..tiles import map_states, map_tokens, unit_roundoff
from ..trial import Trial
from ..verdict import Outcome, Place
from ..witness import DEFAULT_CHUNK
from ..yardstick import measure
from .expectation import Expectation, Plan, no_rows

NAME, TIER = "prefix-state", 4
MOST_SEQUENCES = 2
# A state is read through its rounding to the input dtype, a product and the output's store; RMS.
READ_ROUNDINGS = 2.0


def plan(inputs: Inputs, *, seed: int) -> Plan:
    """One call: the longest sequences, each with K reading tokens behind it."""
    del seed
    if inputs.scale == 0:
        return "the scale is zero"
    lengths = inputs.cu_seqlens.cpu().diff()
    filled = lengths.nonzero().flatten()
    if len(filled) == 0:
        return "no sequence has tokens"
    numbers = sorted(filled[torch.argsort(lengths[filled], descending=True)][:MOST_SEQUENCES].tolist())
    longer = _with_readers(take_sequences(inputs, numbers))

    def judge(trial: Trial, result: RunResult) -> Outcome:
        return compare_reading(trial, numbers, longer, result)

    return [
        Expectation(
            relation=NAME,
            inputs=longer,
            what="reading tokens",
            verb="behind a sequence",
            output_rows=no_rows(inputs.device),
            state_rows=no_rows(inputs.device),
            judge=judge,
            same_shape=False,
        )
    ]


def _with_readers(part: Inputs) -> Inputs:
    """Each sequence of a call with K tokens behind it that read the rows of its state."""
    n_rows = part.q.shape[-1]
    one_hot = torch.eye(n_rows, dtype=part.q.dtype, device=part.device)[:, None]
    heads = part.q.shape[1]
    readers = {
        "q": one_hot.expand(n_rows, heads, n_rows),
        "k": one_hot[:1].expand(n_rows, heads, n_rows),
        "v": part.v.new_zeros(n_rows, *part.v.shape[1:]),
        "g": part.g.new_zeros(n_rows, *part.g.shape[1:]),
        "beta": part.beta.new_zeros(n_rows, *part.beta.shape[1:]),
    }
    cu = part.cu_seqlens.tolist()
    tensors = {
        name: torch.cat([x for a, b in pairwise(cu) for x in (getattr(part, name)[a:b], extra)])
        for name, extra in readers.items()
    }
    behind = torch.arange(len(cu), device=part.device) * n_rows
    return msgspec.structs.replace(part, **tensors, cu_seqlens=part.cu_seqlens + behind)


def compare_reading(trial: Trial, numbers: list[int], longer: Inputs, result: RunResult) -> Outcome:
    """Compare what was read with the states that the case's own call returned."""
    assert trial.state is not None
    n_rows = longer.q.shape[-1]
    ends = longer.cu_seqlens[1:].tolist()
    output = result.outputs["output"].to(trial.witness.device)
    read = torch.stack([output[end - n_rows : end].double().movedim(1, 0) for end in ends]) / longer.scale
    returned = trial.state[torch.tensor(numbers, device=trial.state.device)].double()
    error = (read - returned).square().mean((-2, -1)).sqrt()
    size = returned.square().mean((-2, -1)).sqrt()
    roundoff = max(trial.roundoffs.operand, unit_roundoff(output.dtype), unit_roundoff(trial.state.dtype))
    lost = smallest_error(output.dtype) / abs(longer.scale) + 2 * smallest_error(longer.v.dtype)
    limit = READ_ROUNDINGS * roundoff * size + lost + smallest_error(trial.state.dtype)
    if bool((~(error <= limit)).any()):
        limit = torch.maximum(limit, _honest(trial, numbers, longer, ends))
    bad = ~(error <= limit)
    exercised = read.shape[0] * read.shape[1] * n_rows
    if not bool(bad.any()):
        return Outcome(check=NAME, tier=TIER, status="ok", numbers={"exercised": exercised})
    at, head = bad.nonzero()[0].tolist()
    place = Place(tensor="state", class_="wrong", sequence=numbers[at], head=head)
    measured, allowed = float(error[at, head]), float(limit[at, head])
    reason = (
        f"{NAME}: the final state returned at {where(place)} is not the state that later tokens read: they "
        f"differ by {number(measured)} RMS, {number(allowed)} is what rounding explains"
    )
    numbers_ = {
        "exercised": exercised,
        "error": measured,
        "limit": allowed,
        "would_pass": {"limit": measured},
    }
    return Outcome(check=NAME, tier=TIER, status="fires", reason=reason, place=place, numbers=numbers_)


def _honest(trial: Trial, numbers: list[int], longer: Inputs, ends: list[int]) -> Tensor:
    """[S, HV] what honest runs err at the reading tokens and at the state, in units of the state."""
    if longer.g.ndim == 3:
        return torch.full((len(ends), longer.heads), torch.inf, device=longer.device)
    from ...reference.truth import truth

    size = trial.capabilities_chunk or DEFAULT_CHUNK
    maps = (map_tokens(longer.cu_seqlens, size), map_states(len(ends), longer.device))
    true = truth(**longer.keywords())
    honest = measure(
        longer,
        true,
        maps,
        profile=trial.profile,
        chunk_size=trial.capabilities_chunk,
        l2norm_before=longer.l2norm and trial.info.capabilities.l2norm == "before",
        device=trial.device_type,
    )
    n_rows = longer.q.shape[-1]
    rows = torch.stack([honest.output.row_rms[end - n_rows : end].square().mean(0).sqrt() for end in ends])
    state = trial.yardstick.state
    asked = state.pools.pool_of_tile[torch.tensor(numbers, device=longer.device)]
    limit = RMS_LIMIT * torch.where(state.few[asked], FEW_ROUNDINGS, 1.0)
    return limit * (rows / abs(longer.scale) + state.rms[asked])
