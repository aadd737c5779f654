"""Every faulty kernel as `faulty_kernels:NAME`, and all of them behind `faulty_kernels:dispatch`.

The idea: `dispatch` takes the fault's name as a keyword, so that one worker serves the whole table. The
kernels take what an engine's do: a pool of slots, states that are not to be used, raw q and k.
"""

from __future__ import annotations

import torch
from faulty_base import BASES, namespace
from faulty_table import FAULTS

gdncheck_capabilities = {"l2norm": "in_kernel", "slots": True}

# Small tensors: a second thread only waits, and on a busy machine for long.
torch.set_num_threads(1)

_memories: dict[tuple[str, str], dict] = {}


def dispatch(
    q,
    k,
    v,
    g,
    beta,
    *,
    scale,
    initial_state,
    output_final_state,
    cu_seqlens,
    use_qk_l2norm_in_kernel=False,
    pool=None,
    slot_indices=None,
    has_initial_state=None,
    fault="",
    life="",
):
    """The kernel with one fault (none: sound); `life`: its memory from call to call is its own."""
    edits, base = (FAULTS[fault].edits, FAULTS[fault].base) if fault in FAULTS else ({}, fault or "chunk")
    memory = _memories.setdefault((fault, life), {"calls": 0})
    slots = edits.get("slots", _own)(slot_indices, None) if pool is not None else None
    held = pool[slots.clamp(min=0)] if pool is not None else initial_state
    state = edits.get("states", _where_owned)(held, has_initial_state, slots)
    call = namespace(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        cu_seqlens=cu_seqlens,
        state=state,
        scale=scale,
        l2norm=use_qk_l2norm_in_kernel,
    )
    output, final = BASES[base](call, edits, memory)
    memory["calls"] += 1
    if pool is not None:
        edits.get("scatter", _scatter)(pool, slots, final)
    return output, final


def _own(slots, _):
    return slots.long()


def _where_owned(held, has_state, slots):
    """Zeros for a sequence that starts fresh or owns no slot."""
    if held is None:
        return None
    fresh = torch.zeros(len(held), dtype=torch.bool)
    if has_state is not None:
        fresh |= ~has_state.bool()
    if slots is not None:
        fresh |= slots < 0
    return torch.where(fresh.view(-1, 1, 1, 1), 0.0, held.float())


def _scatter(pool, slots, final):
    owned = slots >= 0
    pool[slots[owned]] = final[owned].to(pool.dtype)


def __getattr__(name):
    """`faulty_kernels:beta_squared` and the like; the unbroken twins are `chunk` and `recurrent`."""
    if name not in FAULTS and name not in BASES:
        raise AttributeError(name)

    def kernel(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
        return dispatch(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            fault=name,
        )

    kernel.gdncheck_capabilities = {}
    return kernel
