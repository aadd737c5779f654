"""What a wrong integer of an exact case gives away: whose value was read instead.

The idea: in an exact case an output row is plus or minus scale times one row of v (or of an initial state),
and those rows are all different; so the row that came back names its owner.
"""

from __future__ import annotations

from torch import Tensor

from ..inputs import Inputs
from ..soundness_words import locate


def reading_of(inputs: Inputs, tensor: str, row: int, head: int, got: Tensor) -> str:
    """`: it was read from token 64 of sequence 0`, or nothing where the row has no owner.

    got: the wrong row of a head, [V] for the output, [K, V] for a state.
    """
    if tensor == "output":
        wanted = got.double() / inputs.scale
        if not bool(wanted.any()):
            return ": nothing was read"
        return owner_of(inputs, wanted, head)
    return ""


def owner_of(inputs: Inputs, row: Tensor, head: int) -> str:
    """Name the token, or the initial state, that a row [V] comes from; its own head is tried first."""
    values = inputs.v.double()
    for other in [head, *(h for h in range(inputs.heads) if h != head)]:
        match = ((values[:, other] == row).all(-1) | (values[:, other] == -row).all(-1)).nonzero().flatten()
        if len(match):
            sequence, token = locate(inputs.cu_seqlens, int(match[0]))
            of_head = "" if other == head else f" of head {other}"
            return f": that is what token {token} of sequence {sequence} wrote{of_head}"
    if inputs.initial_state is None:
        return ""
    state = inputs.initial_state.double()
    match = ((state == row).all(-1) | (state == -row).all(-1)).nonzero()
    if len(match) == 0:
        return ""
    sequence, other, channel = match[0].tolist()
    return f": that is row {channel} of the initial state of sequence {sequence}, head {other}"
