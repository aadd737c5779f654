"""A user's convolution gets the past in the form that it names, and never loses a tensor unsaid.

The idea: a function that names `conv_state` gets rows gathered from a pool, one that names `conv_pool` gets a
pool made of gathered rows, and sequences that start afresh get zeros where it does not name
`has_initial_state`. What cannot be expressed so is refused: a result that ignored half of its call would be
judged wrong for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...capture.errors import Refused
from .conv_state import starting_rows, with_conv_pool

Tensors = dict[str, Tensor]
Finish = Callable[[Tensors], Tensors]
POOL = ("conv_pool", "slot_indices")


def fitted(name: str, tensors: Mapping[str, Tensor], named: set[str]) -> tuple[Tensors, Finish]:
    """(what to call the function with, what makes the operation's outputs of its own).

    Raises Refused for a call that needs a tensor which the function does not name.
    """
    for tensor in ("conv_bias", "num_accepted"):
        if tensor in tensors and tensor not in named:
            raise Refused(f"{name} takes no {tensor}, and the call has one")
    if not {"conv_state", "conv_pool"} & set(tensors):
        return dict(tensors), dict
    if set(POOL) <= named:
        return _in_place(name, tensors, named)
    rows = starting_rows(tensors)
    assert rows is not None
    if "conv_state" in named:
        rest = {n: x for n, x in tensors.items() if n not in (*POOL, "read_slot_indices")}
        return {**rest, "conv_state": rows.contiguous()}, lambda outputs: {
            **outputs, **with_conv_pool(tensors, outputs["final_conv_state"])
        }  # fmt: skip
    if bool((rows != 0).any()):
        raise Refused(f"{name} takes neither conv_state nor conv_pool, and the call starts from a state")
    return dict(tensors), lambda outputs: {
        **outputs, **with_conv_pool(tensors, outputs["final_conv_state"])
    }  # fmt: skip


def _in_place(name: str, tensors: Mapping[str, Tensor], named: set[str]) -> tuple[Tensors, Finish]:
    """A pool of the function's own: it may write it, and return it or not."""
    own = dict(tensors)
    if "conv_pool" not in own:
        own["conv_pool"] = own.pop("conv_state")
        own["slot_indices"] = torch.arange(len(own["conv_pool"]), device=own["conv_pool"].device)
    pool = own["conv_pool"] = own["conv_pool"].clone()
    read = own.get("read_slot_indices", own["slot_indices"])
    if "read_slot_indices" not in named and not torch.equal(read, own["slot_indices"]):
        raise Refused(f"{name} takes no read_slot_indices: it leaves the state where it was read")
    fresh = own.get("has_initial_state")
    if fresh is not None and "has_initial_state" not in named:
        pool[read[~fresh.bool() & (read >= 0)].long()] = 0

    def finish(outputs: Tensors) -> Tensors:
        outputs = {"conv_pool": pool, **outputs}
        if "conv_pool" not in tensors:
            del outputs["conv_pool"]
        return outputs

    return own, finish
