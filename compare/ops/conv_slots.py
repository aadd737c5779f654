"""The convolution's pool: who may write which row, and which rows are nobody's to judge.

Statement. A call writes the rows of `slot_indices` of its own sequences and no other: not the rows that it
only read (`read_slot_indices`), not those of padded sequences (a negative index), not the row that the
kernel calls nobody's. What it leaves in a row is what it returns as that sequence's final state.
Fires on: the first row that changed without a writer; a pool that contradicts the final state.
Silent on: kernels that get their states gathered, and what padded tokens give (nobody reads that).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..verdict import Outcome, Place
from .op import OpInputs, Tensors

NAME, TIER = "conv-slots", 0


def check_pool(inputs: OpInputs, returned: Mapping[str, Tensor], evidence: Mapping[str, Any]) -> Outcome:
    """inputs: the whole call, padded sequences included; returned: the kernel's outputs."""
    pool, after = inputs.tensors.get("conv_pool"), returned.get("conv_pool")
    if evidence.get("null_row_written"):
        return _fires("the row that is nobody's (index 0 of the kernel's own pool) was written", None)
    if pool is None or after is None:
        return Outcome(check=NAME, tier=TIER, status="not-applicable", reason="the kernel takes no pool")
    after = after.to(pool.device)
    if after.shape != pool.shape:
        return _fires(f"conv_pool came back as {list(after.shape)}, not {list(pool.shape)}", None)
    slots = inputs.tensors["slot_indices"].long()
    owned = torch.zeros(pool.shape[0], dtype=torch.bool, device=pool.device)
    owned[slots[slots >= 0]] = True
    now = after.to(pool.dtype)
    kept = ((pool == now) | (torch.isnan(pool) & torch.isnan(now))).flatten(1).all(-1)
    written = (~kept & ~owned).nonzero().flatten().tolist()
    if written:
        return _fires(f"{_whose(inputs, written[0])} was written ({len(written)} such rows in all)", None)
    state = returned["final_conv_state"].to(pool.device)
    for n, slot in enumerate(slots.tolist()):
        if slot >= 0 and not torch.equal(
            torch.nan_to_num(now[slot]), torch.nan_to_num(state[n].to(pool.dtype))
        ):
            return _fires(f"slot {slot} does not hold the final state of its sequence {n}", n)
    return Outcome(check=NAME, tier=TIER, status="ok", numbers={"kept_rows": int((~owned).sum())})


def _whose(inputs: OpInputs, row: int) -> str:
    """What a row that changed without a writer was."""
    read = inputs.tensors.get("read_slot_indices")
    if read is not None and row in read.tolist():
        sequence = read.tolist().index(row)
        return f"slot {row}, from which sequence {sequence} only reads,"
    padded = int((inputs.tensors["slot_indices"] < 0).sum())
    note = f" (the call has {padded} padded sequences)" if padded else ""
    return f"slot {row}, which no sequence of the call owns{note},"


def _fires(reason: str, sequence: int | None) -> Outcome:
    place = Place(tensor="conv_pool", class_="wrong", sequence=sequence)
    return Outcome(check=NAME, tier=TIER, status="fires", reason=reason, place=place)


def without_padding(inputs: OpInputs, returned: Tensors) -> tuple[OpInputs, Tensors]:
    """Inputs and outputs of the sequences that own a slot: padded ones are cut out of both."""
    slots = inputs.tensors.get("slot_indices")
    if slots is None or "conv_pool" not in inputs.tensors or not bool((slots < 0).any()):
        return inputs, returned
    keep = (slots >= 0).nonzero().flatten()
    rows, cu_seqlens = rows_of(inputs.cu_seqlens, keep.tolist())
    tensors = dict(inputs.tensors)
    for name in PER_SEQUENCE:
        if name in tensors:
            tensors[name] = tensors[name][keep]
    tensors["conv_input"] = tensors["conv_input"][rows]
    tensors["cu_seqlens"] = cu_seqlens
    outputs = {**returned, "conv_output": returned["conv_output"][rows.to(returned["conv_output"].device)]}
    state = returned["final_conv_state"]
    outputs["final_conv_state"] = state[keep.to(state.device)]
    return replace(inputs, tensors=tensors, cu_seqlens=cu_seqlens), outputs


PER_SEQUENCE = ("conv_state", "slot_indices", "read_slot_indices", "has_initial_state", "num_accepted")


def rows_of(cu_seqlens: Tensor, sequences: list[int]) -> tuple[Tensor, Tensor]:
    """(packed tokens of some sequences, their own cu_seqlens)."""
    bounds = cu_seqlens.tolist()
    parts = [torch.arange(bounds[n], bounds[n + 1]) for n in sequences]
    lengths = torch.tensor([0, *(len(part) for part in parts)])
    rows = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
    return rows.to(cu_seqlens.device), lengths.cumsum(0).to(cu_seqlens.device)
