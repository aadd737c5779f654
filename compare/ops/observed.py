"""`observed`: the values that a captured engine computed itself, judged as a core that showed them.

The idea: a core case holds what the layer was handed and, beside it, what the engine made of that: q, k, v, g
and beta as the rule got them, the rule's output and state, the norm's output. So the first operation that
departed in the engine can be named without running any kernel again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...capture.case import Case
from ...capture.errors import BadInput

OBSERVED = "observed"
RECORDED = {
    "observed_output": "output",
    "observed_final_state": "final_state",
    "observed_conv_state": "final_conv_state",
    "observed_core_output": "normed",
}


def observed_outputs(case: Case) -> dict[str, Tensor]:
    """The recorded values under the names of the core's outputs.

    Raises BadInput where the case holds too little, or q and k of it are normalised already.
    """
    missing = [name for name in RECORDED if case.get(name) is None]
    if missing:
        raise BadInput(
            f"{case.label}: observed needs {', '.join(missing)}, which the case does not hold; "
            "capture it again with --what core"
        )
    if case.options.qk != "raw":
        raise BadInput(f"{case.label}: observed needs q and k before l2norm; this case has them normalised")
    outputs = {ours: case[name] for name, ours in RECORDED.items()}
    outputs |= {name: case[name] for name in ("q", "k", "v", "g", "beta")}
    outputs["conv_output"] = torch.cat([case[name].flatten(1) for name in ("q", "k", "v")], dim=-1)
    return outputs
