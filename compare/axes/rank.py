"""The share of one rank of a tensor-parallel group: consecutive key heads, their value heads and channels.

The idea: one table says along which axis each tensor of a case is cut, so that the rule, the whole core
(conv channels in the order q|k|v, gates, z) and a pool of states are cut alike. What an engine recorded of
these heads is cut too; what it recorded of the layer's sum over ranks is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...capture.case import Case

# Tensor -> axis that is cut, and by what.
CUTS: dict[str, tuple[int, str]] = {
    **dict.fromkeys(("q", "k"), (1, "key")),
    **dict.fromkeys(("v", "g", "beta", "a", "b", "z", "core_output", "initial_state", "pool"), (1, "value")),
    **dict.fromkeys(("A_log", "dt_bias"), (0, "value")),
    **dict.fromkeys(("conv_input", "conv_state", "conv_pool", "conv_output"), (1, "channel")),
    **dict.fromkeys(("conv_weight", "conv_bias"), (0, "channel")),
    **dict.fromkeys(("observed_output", "observed_core_output", "observed_final_state"), (1, "value")),
    "observed_conv_state": (1, "channel"),
}
SUMMED = ("observed_layer_output",)


def not_shared(n_key: int, n_value: int, ranks: int) -> str:
    """Why heads cannot be dealt to so many ranks; empty where they can."""
    if n_key % ranks or n_value % ranks:
        return f"{n_key} key and {n_value} value heads are not shared evenly by {ranks} ranks"
    return ""


def own_heads(n_heads: int, ranks: int, rank: int) -> Tensor:
    """[n_heads / ranks] int64: the heads of one rank."""
    share = n_heads // ranks
    return torch.arange(rank * share, (rank + 1) * share)


def heads_of_rank(case: Case, ranks: int, rank: int) -> Case:
    """The case as one rank has it, every tensor cut. The heads must be shared evenly (`not_shared`)."""
    (_, n_key, key_dim), (_, n_value, value_dim) = case["q"].shape, case["v"].shape
    assert not not_shared(n_key, n_value, ranks)
    key, value = own_heads(n_key, ranks, rank), own_heads(n_value, ranks, rank)
    of_keys = (key[:, None] * key_dim + torch.arange(key_dim)).flatten()
    of_values = (value[:, None] * value_dim + torch.arange(value_dim)).flatten()
    channels = torch.cat([of_keys, n_key * key_dim + of_keys, 2 * n_key * key_dim + of_values])
    chosen = {"key": key, "value": value, "channel": channels}
    changed: dict[str, Tensor | None] = {
        name: case[name].index_select(axis, chosen[what].to(case[name].device))
        for name, (axis, what) in CUTS.items()
        if case.get(name) is not None
    }
    return case.with_tensors(**changed, **{name: None for name in SUMMED if case.get(name) is not None})
