"""Padded rows: rows of a replayed batch that are nobody's touch nothing.

Statement. An engine captures a decode batch of four in a CUDA graph and replays it for three: the row that
is left over has its old slot in the index tensor and no token, or an index that stands for nobody (-1, or 0
where block 0 is nobody's). The contract's `padding.safe` says which of these the kernel respects. After such
a replay every slot but the three live ones keeps its bits, the padded row's old slot included, and the live
rows have the bits of the batch of four.
Fires on: a slot that a padded row wrote; a live row that changed because another one was padded.
Silent on: paddings that the contract does not name (a kernel without offsets cannot know a stale index).
On a GPU the launch is really captured and replayed; elsewhere it is made again on the changed numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...kernels.interface import KernelInfo, RunResult
from ..inputs import Inputs
from ..trial import Trial
from ..verdict import Outcome, Place
from .expectation import Expectation, Plan, no_rows

NAME, TIER = "padded-rows", 4
ROWS, LIVE = 4, 3
SLOTS = (5, 2, 7, 3)
N_SLOTS = 9
REPLAYS: dict[str, dict[str, Any]] = {
    "empty": {"live": LIVE, "empty": True},
    "empty, handed on": {"live": LIVE, "empty": True, "tail": "first"},
    "-1": {"live": LIVE, "tail": -1},
    "0": {"live": LIVE, "tail": 0},
}
WORDS = {
    "empty": "without a token, its old index left",
    "empty, handed on": "without a token, its old slot now the first row's",
    "-1": "of index -1",
    "0": "of index 0",
}


def plan(inputs: Inputs, *, seed: int, info: KernelInfo) -> Plan:
    """A batch of four as it is, then its replays, each compared with it."""
    if not info.capabilities.replays:
        return "the kernel is not replayed with padded rows here"
    safe = [word for word in info.contract.value("padding.safe", ()) if word in REPLAYS]
    if "empty" in safe:
        safe.append("empty, handed on")
    if not safe:
        return "the contract names no padding that is safe"
    if inputs.n_tokens == 0:
        return "the case has no tokens"
    if inputs.g.ndim == 3:
        return "decode batches are made for one decay per head"
    batch, pool = batch_of(inputs, seed)
    tensors = {"pool": pool, "slot_indices": torch.tensor(SLOTS)}
    return [
        _expectation(batch, tensors, {}, _nothing_yet, lambda first: _replays(batch, tensors, safe, first))
    ]


def batch_of(inputs: Inputs, seed: int) -> tuple[Inputs, Tensor]:
    """Four one-token sequences made of the case's tokens, and a pool [slots, HV, K, V] of other states."""
    dice = torch.Generator().manual_seed(seed + 41)
    rows = torch.randint(0, inputs.n_tokens, (ROWS,), generator=dice).to(inputs.device)
    state = inputs.initial_state
    size = 0.0 if state is None or not state.numel() else float(state.double().square().mean().sqrt())
    if not 0.0 < size < float("inf"):
        size = float(inputs.v.double().square().mean().sqrt()) * inputs.q.shape[-1] ** -0.5 or 1.0
    shape = (N_SLOTS, inputs.heads, inputs.q.shape[-1], inputs.v.shape[-1])
    pool = torch.randn(*shape, generator=dice) * size
    batch = msgspec.structs.replace(
        inputs,
        **{name: getattr(inputs, name)[rows] for name in ("q", "k", "v", "g", "beta")},
        cu_seqlens=torch.arange(ROWS + 1, device=inputs.device),
        initial_state=pool[list(SLOTS)].to(inputs.device),
    )
    return batch, pool


def _expectation(
    batch: Inputs, tensors: dict[str, Tensor], extra: dict[str, Any],
    judge: Callable[[Trial, RunResult], Outcome], then: Callable[[RunResult], Expectation] | None,
) -> Expectation:  # fmt: skip
    return Expectation(
        relation=NAME, inputs=batch, what="a batch of four one-token rows", verb="replayed with padded rows",
        output_rows=no_rows(batch.device), state_rows=no_rows(batch.device), tensors=tensors,
        options={"extra": extra} if extra else {}, judge=judge, then=then, same_shape=False,
        proof="padded_rows" if extra else "",
    )  # fmt: skip


def _nothing_yet(trial: Trial, result: RunResult) -> Outcome:
    reason = "the batch of four itself, which its replays are compared with"
    return Outcome(check=NAME, tier=TIER, status="not-applicable", reason=reason)


def _replays(batch: Inputs, tensors: dict[str, Tensor], words: list[str], first: RunResult) -> Expectation:
    """The first replay of the list, followed by the others."""
    word, rest = words[0], words[1:]

    def judge(trial: Trial, result: RunResult) -> Outcome:
        return compare_replay(tensors["pool"], first, result, WORDS[word])

    then = (lambda _: _replays(batch, tensors, rest, first)) if rest else None
    return _expectation(batch, tensors, {"replay": REPLAYS[word]}, judge, then)


def compare_replay(pool: Tensor, first: RunResult, result: RunResult, padding: str) -> Outcome:
    """Slots and live rows after a replay. pool: as given; first: the batch of four, called plainly."""
    after, whole = result.outputs["pool"].cpu(), _pool_after(pool, first)
    live, wanted = list(SLOTS[:LIVE]), pool.cpu().clone().to(after.dtype)
    wanted[live] = whole[live].to(after.dtype)
    moved = ~_same(after, wanted).flatten(2).all(-1)
    how = "captured and replayed" if result.evidence.get("graph_replayed") else "called again"
    numbers = {"live": LIVE, "padded": ROWS - LIVE, "how": how}
    if bool(moved.any()):
        slot, head = moved.nonzero()[0].tolist()
        whose = (
            f"live row {SLOTS.index(slot)}'s" if slot in live
            else "the padded row's old one" if slot in SLOTS else "nobody's"
        )  # fmt: skip
        sequence = SLOTS.index(slot) if slot in SLOTS else None
        reason = (
            f"{NAME}: with a padded row {padding} ({how}), slot {slot}, {whose}, "
            f"{'has other bits' if slot in live else 'was written'} (head {head}, {int(moved.sum())} rows)"
        )
        place = Place(tensor="state", class_="wrong", sequence=sequence, head=head)
        return Outcome(check=NAME, tier=TIER, status="fires", reason=reason, place=place, numbers=numbers)
    other = ~_same(result.outputs["output"].cpu()[:LIVE], first.outputs["output"].cpu()[:LIVE])
    if bool(other.any()):
        row, head = other.flatten(2).any(-1).nonzero()[0].tolist()
        reason = f"{NAME}: with a padded row {padding} ({how}), output row {row} has other bits (head {head})"
        place = Place(tensor="output", class_="moves", sequence=row, head=head, token=0)
        return Outcome(check=NAME, tier=TIER, status="fires", reason=reason, place=place, numbers=numbers)
    return Outcome(check=NAME, tier=TIER, status="ok", numbers=numbers)


def _pool_after(pool: Tensor, first: RunResult) -> Tensor:
    """The pool after the plain call; a kernel that gathers leaves the writing back to its engine."""
    if "pool" in first.outputs:
        return first.outputs["pool"].cpu()
    whole = pool.cpu().clone()
    whole[list(SLOTS)] = first.outputs["final_state"].cpu().to(whole.dtype)
    return whole


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (torch.isnan(a) & torch.isnan(b))
