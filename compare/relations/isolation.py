"""Isolation: sequences in one call do not touch each other.

Statement. If every other sequence is changed (tokens and initial states), the rest keep their bits, and
the other way round; also if it is poisoned: a row that a kernel reads past a sequence's end and multiplies
by zero shows only where it holds NaN. A sequence that shares its call with none is packed between two
strangers, the one behind poisoned: its result stays what it was alone.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from ..inputs import Inputs
from .expectation import Expectation, same_rows
from .perturb import generator, poison, replace_states, replace_tokens

NAME = "isolation"
STRANGERS = (37, 5)
"""Tokens of the neighbour before and behind: neither is a multiple of a chunk."""


def plan(inputs: Inputs, *, seed: int) -> list[Expectation]:
    """Four calls where there are two sequences or more, else one packed call."""
    if inputs.n_sequences == 1:
        return [_between_strangers(inputs, seed)] if inputs.n_tokens else []
    ways = [(parity, poisoned) for poisoned in (False, True) for parity in (0, 1)]
    calls = [_neighbours_changed(inputs, parity, seed, poisoned) for parity, poisoned in ways]
    return [expected for expected in calls if expected is not None]


def _neighbours_changed(inputs: Inputs, parity: int, seed: int, poisoned: bool) -> Expectation | None:
    cu = inputs.cu_seqlens.cpu()
    number = torch.arange(inputs.n_sequences)
    of_row = torch.repeat_interleave(number, cu[1:] - cu[:-1])
    changed = (of_row % 2 == parity).nonzero().flatten().to(inputs.device)
    kept = (of_row % 2 != parity).nonzero().flatten().to(inputs.device)
    if len(changed) == 0:
        return None
    sequences = number[number % 2 == parity].to(inputs.device)
    if poisoned:
        other = poison(inputs, changed, sequences)
    else:
        other = replace_tokens(inputs, changed, seed=seed, salt=201 + parity)
        other = replace_states(other, sequences, seed=seed, salt=211 + parity)
    return Expectation(
        relation=NAME,
        inputs=other,
        what=f"the {'even' if parity == 0 else 'odd'} sequences",
        verb="filled with NaN" if poisoned else "changed",
        output_rows=same_rows(kept),
        state_rows=same_rows(number[number % 2 != parity].to(inputs.device)),
        changed_rows=changed,
    )


def _between_strangers(inputs: Inputs, seed: int) -> Expectation:
    """One sequence of strangers on each side; none of their rows is compared."""
    before, behind = STRANGERS
    total = before + inputs.n_tokens + behind
    dice = generator(seed, 221)
    pick = torch.randint(0, inputs.n_tokens, (total,), generator=dice).to(inputs.device)
    own = torch.arange(before, before + inputs.n_tokens, device=inputs.device)
    pick[own] = torch.arange(inputs.n_tokens, device=inputs.device)
    packed = msgspec.structs.replace(
        inputs,
        **{name: getattr(inputs, name)[pick] for name in ("q", "k", "v", "g", "beta")},
        cu_seqlens=torch.tensor([0, before, before + inputs.n_tokens, total], device=inputs.device),
        initial_state=_three_states(inputs.initial_state),
    )
    strangers = torch.cat([torch.arange(before), torch.arange(before + inputs.n_tokens, total)]).to(
        inputs.device
    )
    packed = replace_tokens(packed, strangers, seed=seed, salt=222)
    packed = replace_states(packed, torch.tensor([0, 2], device=inputs.device), seed=seed, salt=223)
    packed = poison(packed, strangers[before:], torch.tensor([2], device=inputs.device))
    zero = torch.zeros(1, dtype=torch.int64, device=inputs.device)
    return Expectation(
        relation=NAME,
        inputs=packed,
        what=f"packed between strangers of {before} and {behind} tokens",
        output_rows=(own - before, own),
        state_rows=(zero, zero + 1),
        same_shape=False,
    )


def _three_states(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.expand(3, *state.shape[1:]).clone()
