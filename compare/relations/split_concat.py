"""Split and concatenate: a prefill cut at a chunk boundary, the state handed on, equals the uncut one.

Statement. If the first p tokens of a sequence are one call and the rest, from the state that it returned,
another, then outputs and final state are those of the uncut call; p a multiple of the chunk size (any p for
a recurrent kernel). In float32 hand-over that is what the kernel's own loop does.
Exercised by the tokens that came in the second call.
Fires on: a state that is dropped, rounded, transposed or of the wrong sequence; a cut that drops or repeats
a token.
Silent on: rounding of the hand-over, where bits are not promised.
"""

from __future__ import annotations

import math

import msgspec
import torch

from ...kernels.interface import KernelInfo, RunResult
from ..inputs import Inputs, take_sequences
from ..yardstick import GENERIC, OTHER_CHUNKS
from .expectation import Expectation, Plan, no_rows
from .perturb import generator

NAME = "split-concat"


def chunk_of(info: KernelInfo) -> int:
    """Tokens between which a cut moves no chunk. A kernel that declares nothing may work in any usual size,
    and where keys are alike another chunking moves a sound result by more than two runs may differ."""
    chunk_size = info.capabilities.default_chunk_size
    if chunk_size is None:
        return 1
    declared = info.capabilities.profile or info.contract.value("precision.profile")
    return math.lcm(chunk_size, *OTHER_CHUNKS) if declared in (None, GENERIC) else chunk_size


def plan(inputs: Inputs, *, seed: int, info: KernelInfo) -> Plan:
    """Two calls: the heads of all sequences longer than a chunk, then their rests."""
    step = chunk_of(info)
    cu = inputs.cu_seqlens.cpu()
    lengths = cu.diff()
    chosen = (lengths > step).nonzero().flatten()
    if len(chosen) == 0:
        return f"no sequence is longer than {step} tokens"
    dice = generator(seed, 331)
    cuts = [
        step * (1 + int(torch.randint(0, (int(lengths[n]) - 1) // step, (1,), generator=dice)))
        for n in chosen
    ]
    numbers = chosen.tolist()
    device = inputs.device
    head_rows = torch.cat([torch.arange(cut) + int(cu[n]) for n, cut in zip(numbers, cuts, strict=True)])
    rest_rows = torch.cat(
        [torch.arange(int(cu[n]) + cut, int(cu[n + 1])) for n, cut in zip(numbers, cuts, strict=True)]
    )
    what = f"the prefill of sequence {numbers[0]} at token {cuts[0]}" + (
        ", others too" if len(numbers) > 1 else ""
    )
    head = Expectation(
        relation=NAME,
        inputs=take_sequences(inputs, numbers, tokens=cuts),
        what=what,
        verb="cut",
        output_rows=(head_rows.to(device), torch.arange(len(head_rows), device=device)),
        state_rows=no_rows(device),
        exercised=len(rest_rows),
        same_shape=False,
    )
    rest = take_sequences(inputs, numbers, skip=cuts)

    def then(result: RunResult) -> Expectation:
        handed = result.outputs["final_state"].to(device)
        return Expectation(
            relation=NAME,
            inputs=msgspec.structs.replace(rest, initial_state=handed),
            what=what,
            verb="cut",
            output_rows=(rest_rows.to(device), torch.arange(len(rest_rows), device=device)),
            state_rows=(chosen.to(device), torch.arange(len(chosen), device=device)),
            exercised=len(rest_rows),
            same_shape=False,
        )

    return [msgspec.structs.replace(head, then=then)]
