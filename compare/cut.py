"""A shorter case: the first tokens of the first sequence, as a case of its own.

The idea: a prefix of a sequence is itself a sound case (the rule is causal), so a slow kernel can be judged
on what it can afford. What the engine recorded of the whole call is dropped, because it is not of the prefix.
"""

from __future__ import annotations

import msgspec

from ..capture.case import Case
from ..capture.errors import BadInput

PER_TOKEN = ("q", "k", "v", "g", "beta", "conv_input", "a", "b", "z", "conv_output", "core_output")
PER_SEQUENCE = (
    "initial_state", "has_initial_state", "slot_indices", "num_accepted", "draft", "state_columns",
    "conv_state",
)  # fmt: skip
WHOLE_CALL = (
    "observed_output", "observed_final_state", "observed_conv_state", "observed_core_output",
    "observed_layer_output",
)  # fmt: skip


def first_tokens(case: Case, n_tokens: int) -> Case:
    """The first n_tokens of the first sequence that has any; all of it where it is shorter."""
    if case.n_tokens == 0:
        raise BadInput(f"{case.label}: it has no tokens, so there are no first {n_tokens}; leave --first out")
    number = next(i for i, length in enumerate(case.lengths) if length)
    start = int(case["cu_seqlens"][number])
    stop = start + min(n_tokens, case.lengths[number])
    changed = {name: case[name][start:stop] for name in PER_TOKEN if case.get(name) is not None}
    changed |= {name: case[name][number : number + 1] for name in PER_SEQUENCE if case.get(name) is not None}
    if "draft" in changed:
        changed["draft"] = changed["draft"].clamp(max=stop - start)
    changed["cu_seqlens"] = case["cu_seqlens"].new_tensor([0, stop - start])
    shorter = case.with_tensors(**changed, **dict.fromkeys(WHOLE_CALL))
    # The file stays its name: the report says which file, and --first in its command says which part.
    return msgspec.structs.replace(shorter, path=case.path, content_hash=None)
