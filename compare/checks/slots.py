"""Slots: a kernel that addresses a pool writes the rows of its own sequences and no other.

Statement. After a call with `pool` and `slot_indices`, every slot that no sequence owns keeps its bits,
whatever it holds (NaN and another tenant's state included), and a padding index (-1) owns none.
Fires on: the first slot that changed without an owner.
Silent on: kernels that get their states gathered.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..verdict import Outcome, Place

NAME, TIER = "unowned-slots", 4


def check(given: Mapping[str, Tensor], returned: Mapping[str, Tensor]) -> Outcome:
    """given: the call's tensors; returned: the kernel's, `pool` [slots, HV, K, V] among them."""
    pool, after = given.get("pool"), returned.get("pool")
    if pool is None or after is None:
        return Outcome(check=NAME, tier=TIER, status="not-applicable", reason="the kernel takes no pool")
    if after.shape != pool.shape:
        reason = f"the pool came back as {list(after.shape)}, not {list(pool.shape)}"
        place = Place(tensor="state", class_="wrong")
        return Outcome(check=NAME, tier=TIER, status="fires", reason=reason, place=place)
    owned = torch.zeros(pool.shape[0], dtype=torch.bool)
    slots = given["slot_indices"].long().cpu()
    owned[slots[slots >= 0]] = True
    before, now = pool.cpu(), after.cpu().to(pool.dtype)
    kept = ((before == now) | (torch.isnan(before) & torch.isnan(now))).flatten(2).all(-1)
    changed = (~kept & ~owned[:, None]).nonzero()
    if len(changed) == 0:
        return Outcome(check=NAME, tier=TIER, status="ok", numbers={"slots": int((~owned).sum())})
    slot, head = changed[0].tolist()
    return Outcome(
        check=NAME,
        tier=TIER,
        status="fires",
        place=Place(tensor="state", class_="wrong", head=head),
        reason=f"slot {slot}, which no sequence of the call owns, was written (head {head}, "
        f"{len(changed)} rows in all)",
        numbers={"slot": slot, "rows": len(changed)},
    )


def final_states(given: Mapping[str, Tensor], returned: Mapping[str, Tensor]) -> Tensor | None:
    """[N, HV, K, V]: what was returned, else the owned rows of the pool; padding rows are zero."""
    state = returned.get("final_state")
    pool = returned.get("pool")
    if state is not None or pool is None or "slot_indices" not in given:
        return state
    slots = given["slot_indices"].long().to(pool.device)
    gathered = pool.new_zeros(len(slots), *pool.shape[1:])
    gathered[slots >= 0] = pool[slots[slots >= 0]]
    return gathered
