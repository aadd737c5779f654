"""What a convolution is asked besides the case: the same kernel on calls that a case seldom holds.

The idea: a convolution's faults live in its first W-1 tokens and in who owns which row, and a captured case
shows few of either. So the kernel is handed the case's own rows again, in calls made for that: sequences
shorter than the window, one sequence cut at every place, a pool of strangers, padded sequences, other slots
to write than to read, drafts. Each call is judged by the checks of the operation against its own truth, so
that no call needs a promise of its kernel; what an adapter declines is not applicable.

Statement. After a prefix, a sequence is the state it left: every cut, packing and slot gives what the
whole, alone and in place gives. Fires on: the first call whose answer fails. Silent on: sound kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.interface import KernelInfo, RunResult
from ...reference.conv import causal_conv
from ..verdict import Outcome
from .op import Op, OpInputs, Tensors

TIER = 4
BLOCKS = (8, 16, 64)  # tokens of one program: vLLM's and fla's blocks, causal-conv1d's chunk
BLOCKS_INTERPRETED = (8, 16)
# A clause that disclaims separate slots of short sequences; a case that has them is judged all the same.
SHORT = "slots.separate-short"
STRANGERS = (float("nan"), 1e30, 3.0)


@dataclass(frozen=True)
class Variant:
    """One further call."""

    name: str
    text: str
    """Follows `in a call of`."""
    inputs: OpInputs


def relations_of(runner: Any, op: Op, inputs: OpInputs, seed: int) -> list[Outcome]:
    """Run every variant and rule on each. runner: an open kernel (`session.Runner`)."""
    from .inputs import call_of_op

    finite = (torch.isfinite(inputs.tensors[n]).all() for n in ("conv_input", "conv_weight"))
    if not all(map(bool, finite)) or not len(inputs.tensors["conv_input"]):
        return []
    interpreted = bool(runner.info.environment.get("interpreted"))
    make = update_variants if op.name == "conv-update" else prefill_variants
    rows = Rows(inputs, seed, whole_windows=runner.info.contract.find(SHORT) is not None)
    outcomes = []
    for variant in make(rows, BLOCKS_INTERPRETED if interpreted else BLOCKS):
        result = runner.run([call_of_op(op.name, variant.inputs)])[0]
        outcomes.append(_outcome(op, variant, runner.info, result))
    return outcomes


def _outcome(op: Op, variant: Variant, info: KernelInfo, result: RunResult) -> Outcome:
    """One call's outcome: the first check that fires, or why there was no answer."""
    said = f"in a call of {variant.text}: "
    if result.status != "ok":
        reason = said + (result.message or f"it ended with {result.status}")
        declined = result.status == "refused"
        return Outcome(
            check=variant.name,
            tier=TIER,
            status="not-applicable" if declined else "suspect",
            reason=reason,
        )
    fault = _first_fault(op, variant.inputs, info, result)
    if fault is None:
        return Outcome(check=variant.name, tier=TIER, status="ok", numbers={"exercised": 1})
    return Outcome(
        check=variant.name, tier=TIER, status="fires", reason=said + fault.reason, place=fault.place
    )


def _first_fault(op: Op, inputs: OpInputs, info: KernelInfo, result: RunResult) -> Outcome | None:
    """The bound of every entry stands in for the emulation: what is sought here is no matter of rounding."""
    from .checks import check_copies, check_exact, check_nonfinite, check_shapes
    from .trial import OpTrial

    fault = check_shapes(op, inputs, result.outputs)
    if fault is not None:
        return fault
    outcomes = [] if op.beside is None else [op.beside(inputs, result.outputs, result.evidence)]
    owned, outputs = op.owned(inputs, dict(result.outputs))
    trial = OpTrial(op, owned, info, outputs)
    outcomes += [check(trial) for check in (check_nonfinite, check_copies, check_exact, *op.checks)]
    return next((o for o in outcomes if o.status == "fires"), None)


class Rows:
    """Tokens and states made of the case's own rows, no two alike."""

    def __init__(self, inputs: OpInputs, seed: int, *, whole_windows: bool = False) -> None:
        """whole_windows: separate slots are asked for with W-1 tokens or more only."""
        t = inputs.tensors
        self.whole_windows = whole_windows
        self.inputs, self.x, self.weight = inputs, t["conv_input"], t["conv_weight"]
        self.history = self.weight.shape[1] - 1
        self.dice = torch.Generator().manual_seed(seed * 9_176_123 + 77)
        self.base = self.x if bool((self.x != 0).any()) else torch.ones_like(self.x[:1])
        self.shift = 0

    def tokens(self, n: int) -> Tensor:
        """[n, D]: rows of the case, each with a sign and its channels turned by another step."""
        picks = torch.randint(len(self.base), (n,), generator=self.dice).tolist()
        signs = torch.randint(2, (n,), generator=self.dice).tolist()
        rows = []
        for pick, sign in zip(picks, signs, strict=True):
            self.shift += 1
            rows.append(self.base[pick].roll(self.shift) * (1 - 2 * sign))
        return torch.stack(rows) if rows else self.x[:0]

    def states(self, n: int) -> Tensor:
        """[n, D, W-1]."""
        return self.tokens(n * self.history).view(n, self.history, -1).transpose(1, 2).contiguous()

    def order(self, n: int) -> Tensor:
        """A permutation of n that is not the identity, for n > 1."""
        order = torch.randperm(n, generator=self.dice)
        return order.roll(1) if n > 1 and bool((order == torch.arange(n)).all()) else order

    def call(self, x: Tensor, lengths: Sequence[int], **tensors: Tensor) -> OpInputs:
        """Inputs with the case's taps and bias, and other tokens and states."""
        t = self.inputs.tensors
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(self.x.device)
        kept: Tensors = {n: t[n] for n in ("conv_weight", "conv_bias") if n in t}
        moved = {name: tensor.to(self.x.device) for name, tensor in tensors.items()}
        return replace(
            self.inputs,
            tensors={**kept, "conv_input": x, "cu_seqlens": cu_seqlens, **moved},
            cu_seqlens=cu_seqlens,
        )

    def pool(self, n_rows: int, columns: int | None = None) -> Tensor:
        """[n_rows, D, columns] of strangers: NaN, a huge number, somebody else's state, in turn."""
        columns = self.history if columns is None else columns
        largest = float(torch.finfo(self.x.dtype).max) / 4
        shape = (n_rows, self.x.shape[1], columns)
        pool = torch.empty(shape, dtype=self.x.dtype, device=self.x.device)
        for row in range(n_rows):
            pool[row] = min(STRANGERS[row % 3], largest) if row % 3 else STRANGERS[0]
        return pool


def prefill_variants(rows: Rows, blocks: Sequence[int]) -> Iterator[Variant]:
    """The further calls of `conv`."""
    width = rows.history + 1
    short = list(range(1, width + 3))
    yield Variant(
        "short-sequences",
        f"sequences of 1 to {short[-1]} tokens, each started from a state",
        rows.call(rows.tokens(sum(short)), short, conv_state=rows.states(len(short))),
    )
    yield Variant("split-concat", "one sequence cut at every place", cut(rows, 2 * width + 2))
    for block in blocks:
        places = [block - 1, block, block + 1]
        yield Variant(
            "split-concat",
            f"one sequence cut around token {block}",
            cut(rows, block + width + 2, places),
        )
    yield from pool_variants(rows, [3, 1, width + 3, 2, 1], seed_lengths=[2, 1])
    middle = rows.tokens(width + 1)
    loud = [rows.tokens(5) * 16, middle, rows.tokens(4) * -16]
    yield Variant(
        "isolation",
        "a sequence between two others of 16 times its size",
        rows.call(torch.cat(loud), [len(part) for part in loud]),
    )
    yield Variant("alone", "one sequence alone", rows.call(middle, [len(middle)]))


def update_variants(rows: Rows, blocks: Sequence[int]) -> Iterator[Variant]:
    """The further calls of `conv-update`."""
    yield Variant(
        "steps",
        "one token of each of 3 sequences",
        rows.call(rows.tokens(3), [1] * 3, conv_state=rows.states(3)),
    )
    yield from pool_variants(rows, [1] * 5, seed_lengths=[1, 1])
    for lengths in ([3, 3, 3, 3], [1, 3, 2, 0]):
        yield Variant("drafts", f"drafts of {lengths} tokens behind an accepted part", drafts(rows, lengths))


def cut(rows: Rows, n_tokens: int, places: Sequence[int] | None = None) -> OpInputs:
    """A sequence's two parts for each place, in one call; the second part starts from the true state."""
    x, past = rows.tokens(n_tokens), rows.states(1)
    parts, states = [], []
    for place in range(1, n_tokens) if places is None else places:
        _, state = causal_conv(x[:place], rows.weight, None, past)
        parts += [x[:place], x[place:]]
        states += [past, state.to(past.dtype)]
    return rows.call(torch.cat(parts), [len(p) for p in parts], conv_state=torch.cat(states))


def pool_variants(rows: Rows, lengths: Sequence[int], seed_lengths: Sequence[int]) -> Iterator[Variant]:
    """Slots of a pool of strangers: out of order, with fresh, padded and separate ones."""
    n = len(lengths)
    has_state = torch.tensor([i % 2 == 1 for i in range(n)])
    slots = rows.order(n + 3)[:n]
    pool = rows.pool(n + 3)
    pool[slots[has_state].to(pool.device)] = rows.states(int(has_state.sum()))
    yield Variant(
        "slot-permutation",
        "slots out of order in a pool of NaN, huge numbers and strangers, some sequences fresh",
        rows.call(
            rows.tokens(sum(lengths)),
            lengths,
            conv_pool=pool,
            slot_indices=slots,
            has_initial_state=has_state,
        ),
    )
    first, last = seed_lengths
    padded = [first, *lengths[:2], first, *lengths[2:], last]
    where = torch.tensor([i in (0, 3, len(padded) - 1) for i in range(len(padded))])
    # The last row is a stranger's: it is what an index of -1 finds where nobody looks for it.
    slots = rows.order(n + 2)[:n]
    indices = torch.full((len(padded),), -1)
    indices[~where] = slots
    pool = rows.pool(n + 3)
    pool[slots.to(pool.device)] = rows.states(n)
    yield Variant(
        "padding",
        "padded sequences (slot -1) before, between and after others",
        rows.call(rows.tokens(sum(padded)), padded, conv_pool=pool, slot_indices=indices),
    )
    if rows.whole_windows:
        lengths = [max(length, rows.history) for length in lengths]
    order = rows.order(2 * n + 1)
    read, write = order[:n], order[n : 2 * n]
    pool = rows.pool(2 * n + 1)
    pool[read.to(pool.device)] = rows.states(n)
    yield Variant(
        "separate-slots",
        "sequences that read one slot and write another",
        rows.call(
            rows.tokens(sum(lengths)), lengths, conv_pool=pool, slot_indices=write, read_slot_indices=read
        ),
    )


def drafts(rows: Rows, lengths: Sequence[int]) -> OpInputs:
    """A verify step: rows that hold the draft before, of which num_accepted tokens count."""
    n, longest = len(lengths), max(lengths)
    columns = rows.history + longest - 1
    accepted = torch.tensor([1 + (i * 2) % longest for i in range(n)])
    slots = rows.order(n + 2)[:n]
    pool = rows.pool(n + 2, columns)
    for slot, count in zip(slots.tolist(), accepted.tolist(), strict=True):
        pool[slot, :, count - 1 : count - 1 + rows.history] = rows.states(1)[0]
    return rows.call(
        rows.tokens(sum(lengths)), lengths, conv_pool=pool, slot_indices=slots, num_accepted=accepted
    )
