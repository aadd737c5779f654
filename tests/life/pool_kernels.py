"""Kernels by import path that work on a pool in place: a sound one, and ones that get a slot wrong.

Sound is the float64 rule, rounded once. Each fault is in the addressing alone: what it computes is right for
the state that it read.
"""

from __future__ import annotations

import torch
from gdncheck.reference.recurrence import recurrence

CAPABILITIES = {
    "default_chunk_size": None,
    "slots": True,
    "profile": "fla-recurrent",
    "state_dtypes": ("float32", "bfloat16"),
}


def in_place(q, k, v, g, beta, scale, cu_seqlens, pool, read, write):
    """Run every sequence that owns a slot; read, write: [N] slots, negative for nobody's."""
    owned = read >= 0
    start = torch.where(owned.view(-1, 1, 1, 1), pool[read.clamp(min=0)], 0)
    output, final = recurrence(q, k, v, g, beta, scale=scale, initial_state=start, cu_seqlens=cu_seqlens)
    some = (write >= 0) & (cu_seqlens.diff() > 0)
    pool[write[some]] = final[some].to(pool.dtype)
    return output.to(v.dtype), final.to(pool.dtype)


def zero_fresh(pool, slots, has_initial_state):
    fresh = ~has_initial_state.bool() & (slots >= 0)
    pool[slots[fresh]] = 0


def sound(
    q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, pool, slot_indices,
    has_initial_state,
):  # fmt: skip
    """Reads and writes its sequences' slots."""
    slots = slot_indices.long()
    zero_fresh(pool, slots, has_initial_state)
    return in_place(q, k, v, g, beta, scale, cu_seqlens, pool, slots, slots)


def reads_the_next_slot(
    q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, pool, slot_indices,
    has_initial_state,
):  # fmt: skip
    """A lone one-token sequence reads the slot behind its own."""
    slots = slot_indices.long()
    zero_fresh(pool, slots, has_initial_state)
    off = 1 if v.shape[0] == 1 and bool(has_initial_state.all()) else 0
    read = torch.where(slots >= 0, (slots + off).clamp(max=len(pool) - 1), slots)
    return in_place(q, k, v, g, beta, scale, cu_seqlens, pool, read, slots)


def keeps_a_stale_slot(
    q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, pool, slot_indices,
    has_initial_state,
):  # fmt: skip
    """Takes every one-token sequence for one that has a state."""
    slots = slot_indices.long()
    zero_fresh(pool, slots, has_initial_state | (cu_seqlens.diff() == 1))
    return in_place(q, k, v, g, beta, scale, cu_seqlens, pool, slots, slots)


def padded_row_wraps(
    q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, pool, slot_indices,
    has_initial_state,
):  # fmt: skip
    """Index -1 is the pool's last row."""
    slots = slot_indices.long() % len(pool)
    zero_fresh(pool, slots, has_initial_state)
    return in_place(q, k, v, g, beta, scale, cu_seqlens, pool, slots, slots)


def raises(
    q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, pool, slot_indices,
    has_initial_state,
):  # fmt: skip
    """No answer."""
    raise RuntimeError("out of blocks")


for _kernel in (sound, reads_the_next_slot, keeps_a_stale_slot, padded_row_wraps, raises):
    _kernel.gdncheck_capabilities = CAPABILITIES
