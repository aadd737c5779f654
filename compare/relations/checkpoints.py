"""Checkpoints: a state that is stored at token p is the final state of the first p tokens.

Statement. A kernel that exports states from inside a prefill (the ones at the starts of its chunks, or one
after every page of P tokens) exports the states of the prefixes, each sequence's own. Memory that it leaves
unwritten holds NaN here. Page sizes are tried that are the chunk size and that are not.
Fires on: a state of another sequence, of another chunk, from the other side of the chunk, or one not written.
Silent on: rounding of the stored dtype; kernels that export none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...kernels.interface import KernelInfo, RunResult
from ..checkpoints import NAME, Stored, at_chunk_starts, at_every, judge_checkpoints
from ..inputs import Inputs
from ..trial import Trial
from ..verdict import Outcome
from .expectation import Expectation, Plan, no_rows

# Of a kernel that takes a page size: the usual chunk, and pages that no chunk divides.
PAGES = (64, 48, 100)


def plan(inputs: Inputs, *, info: KernelInfo) -> Plan:
    """One call for chunk starts, or one for each page size that fits."""
    how = info.capabilities.checkpoints
    if how is None:
        return "the kernel exports no states from inside a prefill"
    lengths = inputs.cu_seqlens.diff().tolist()
    if max(lengths, default=0) == 0:
        return "no sequence has tokens"
    if how == "chunks":
        size = info.capabilities.default_chunk_size or PAGES[0]
        return [_expectation(inputs, {"checkpoints": True}, at_chunk_starts(lengths, size), "chunk starts")]
    longest = max(lengths)
    pages = [page for page in PAGES if page <= longest] or [max(1, longest // 2)]
    return [
        _expectation(inputs, {"checkpoint_every": page}, at_every(lengths, page), f"every {page} tokens")
        for page in pages
    ]


def _expectation(
    inputs: Inputs, extra: dict[str, object], places: Sequence[Stored], what: str
) -> Expectation:
    return Expectation(
        relation=NAME, inputs=inputs, what=f"states at {what}", verb="exported",
        output_rows=no_rows(inputs.device), state_rows=no_rows(inputs.device),
        options={"extra": extra, "poison": "nan"}, judge=_judge(places), exercised=len(places),
    )  # fmt: skip


def _judge(places: Sequence[Stored]) -> Callable[[Trial, RunResult], Outcome]:
    return lambda trial, result: judge_checkpoints(trial, places, result.outputs.get("checkpoints"))
