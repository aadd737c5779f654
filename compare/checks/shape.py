"""Shape: a kernel returns an output and a final state of the canonical shapes, in a floating dtype.

Statement. output is [T, HV, V] and, when asked for, final_state is [N, HV, K, V].
Fires on: a missing tensor, another shape, an integer dtype.
Silent on: a wider dtype than the inputs' (a more exact answer is no fault).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..inputs import Inputs
from ..verdict import Outcome, Place

NAME, TIER = "shape", 0


def check(inputs: Inputs, outputs: Mapping[str, Tensor], *, state_asked: bool = True) -> Outcome:
    """Compare what came back with the shapes of the case. Raises nothing."""
    key, value = inputs.q.shape[-1], inputs.v.shape[-1]
    wanted: dict[str, tuple[int, ...]] = {"output": (inputs.n_tokens, inputs.heads, value)}
    if state_asked:
        wanted["final_state"] = (inputs.n_sequences, inputs.heads, key, value)
    for name, shape in wanted.items():
        reason = _fault(name, outputs.get(name), shape)
        if reason:
            place = Place(tensor="state" if name == "final_state" else name, class_="wrong")
            return Outcome(check=NAME, tier=TIER, status="fires", reason=reason, place=place)
    return Outcome(check=NAME, tier=TIER, status="ok")


def _fault(name: str, got: Tensor | None, shape: tuple[int, ...]) -> str:
    if got is None:
        return f"the kernel returned no {name}"
    if not got.dtype.is_floating_point:
        return f"{name} came back as {got.dtype}, which is no floating dtype"
    if tuple(got.shape) == shape:
        return ""
    hint = ""
    if name == "final_state" and tuple(got.shape) == (*shape[:2], shape[3], shape[2]):
        hint = ": K and V are swapped"
    return f"{name} came back as {list(got.shape)}, not {list(shape)}{hint}"
