"""Causality at many cuts: no token is reached by a later one, wherever it lies.

Statement. A leak from token s to token t < s shows if and only if the tokens from some cut in (t, s] on are
changed. So one call holds many prefixes of the sequences, each cut at another token and followed by loud
strangers; the rows before each cut agree with the first call's.
Exercised by the cuts.
Fires on: a leak at a few tokens only, or so faint that rounding hides it in any single answer.
Silent on: lost bits within rounding, since the call has another shape. One cut with every bit compared is
`causality`'s.
"""

from __future__ import annotations

import msgspec
import torch

from ...kernels.interface import RunResult
from ..inputs import Inputs
from ..trial import Trial
from ..verdict import Outcome
from .compare_runs import compare_runs
from .expectation import Expectation, Plan, no_rows
from .perturb import replace_tokens

NAME = "causality-cuts"
# Tokens of the packed call: dozens of short prefixes, a fraction of a second for a kernel in plain torch.
TOKENS = 12288
STRANGERS = 4
"""Changed tokens behind a cut, at most: a leak from further on has another cut before its source."""
BLOCKS = (64, 16)
"""Sizes whose multiples come first: masks and tiles end there."""


def plan(inputs: Inputs, *, seed: int) -> Plan:
    """One call of as many cut prefixes as TOKENS allows: chunk ends first, then every other token."""
    cuts = choose_cuts(inputs.cu_seqlens.diff().tolist())
    if not cuts:
        return f"no sequence of two tokens has a prefix below {TOKENS} tokens"
    starts = inputs.cu_seqlens.tolist()
    pieces, strangers, at = [], [], 0
    for number, cut, stop in cuts:
        pieces.append(torch.arange(starts[number], starts[number] + stop))
        strangers.append(torch.arange(at + cut, at + stop))
        at += stop
    rows, changed = (torch.cat(part).to(inputs.device) for part in (pieces, strangers))
    lengths = torch.tensor([0, *(stop for _, _, stop in cuts)], device=inputs.device)
    state, chosen = inputs.initial_state, torch.tensor([n for n, _, _ in cuts], device=inputs.device)
    packed = msgspec.structs.replace(
        inputs,
        **{name: getattr(inputs, name)[rows] for name in ("q", "k", "v", "g", "beta")},
        cu_seqlens=lengths.cumsum(0),
        initial_state=None if state is None else state[chosen],
    )
    kept = torch.ones(len(rows), dtype=torch.bool, device=inputs.device)
    kept[changed] = False
    own = kept.nonzero().flatten()
    expected = Expectation(
        relation=NAME,
        inputs=replace_tokens(packed, changed, seed=seed, salt=131),
        what=f"the tokens behind {len(cuts)} cuts, each in a copy of its prefix,",
        output_rows=(rows[own], own),
        state_rows=no_rows(inputs.device),
        exercised=len(cuts),
        same_shape=False,
    )
    return [msgspec.structs.replace(expected, judge=lambda trial, result: judge(trial, expected, result))]


def choose_cuts(lengths: list[int], *, budget: int = TOKENS) -> list[tuple[int, int, int]]:
    """(sequence, cut, tokens of its copy) for the most telling cuts that the budget pays for."""
    ranked = []
    for number, length in enumerate(lengths):
        for cut in range(1, length):
            # The last token of a block, and the end, before evens, before odds.
            block = next((i for i, size in enumerate(BLOCKS) if cut % size == 0), len(BLOCKS))
            rank = 0 if cut == length - 1 else 1 + block + (cut % 2 if block == len(BLOCKS) else 0)
            ranked.append((rank, cut, number, min(length, cut + STRANGERS)))
        if len(ranked) > 4 * budget:
            break
    chosen, spent = [], 0
    for _, cut, number, stop in sorted(ranked):
        if spent + stop <= budget:
            chosen.append((number, cut, stop))
            spent += stop
    return sorted(chosen)


def judge(trial: Trial, expected: Expectation, result: RunResult) -> Outcome:
    """Copy by copy, since a row of the first call is compared with many; the first breach decides."""
    output = result.outputs["output"].to(trial.output.device)
    base, own = expected.output_rows
    same = (output[own] == trial.output[base]) | (torch.isnan(output[own]) & torch.isnan(trial.output[base]))
    moved = ~same.flatten(1).all(-1)
    copy_of = torch.searchsorted(expected.inputs.cu_seqlens, own, right=True) - 1
    kept: Outcome | None = None
    for copy in sorted(set(copy_of[moved].tolist())):
        here = copy_of == copy
        one = msgspec.structs.replace(expected, output_rows=(base[here], own[here]), judge=None)
        outcome = compare_runs(trial, one, output, None, promise="observed", steady=True)
        if outcome.status == "fires":
            return outcome
        kept = kept or outcome
    numbers = {"rows": len(own), "cuts": len(expected.inputs.cu_seqlens) - 1}
    if kept is None:
        return Outcome(check=NAME, tier=4, status="ok", numbers={**numbers, "bits": "equal"})
    return msgspec.structs.replace(kept, numbers={**kept.numbers, **numbers})
