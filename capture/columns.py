"""Slots of a verify step: a column for the state after each token of a draft, read without any kernel.

A speculative step must be able to go back to any of its tokens, so it has a row of slots per sequence:
`slot_indices` [N, columns], the state after token t going to column t (-1: kept nowhere). `num_accepted` [N]
counts the tokens of the sequence's *previous* step that were accepted: the step starts from column
num_accepted - 1. A case with one slot per sequence has one column.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def columns_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """slot_indices as [N, columns] int64."""
    slots = tensors["slot_indices"].long()
    return slots[:, None] if slots.dim() == 1 else slots


def accepted_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """num_accepted as [N] int64; 1, the first column, where the call does not say."""
    slots, given = tensors["slot_indices"], tensors.get("num_accepted")
    if given is not None and slots.dim() == 2:
        return given.long()
    return torch.ones(slots.shape[0], dtype=torch.int64, device=slots.device)


def start_slots(tensors: Mapping[str, Tensor]) -> Tensor:
    """[N] int64: the slot that each sequence starts from; negative for a padded row."""
    columns = columns_of(tensors)
    return columns.gather(1, (accepted_of(tensors) - 1).clamp(0, columns.shape[1] - 1)[:, None])[:, 0]
