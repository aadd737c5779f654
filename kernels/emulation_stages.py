"""The stages of the emulation, served as `fla_stages` serves fla's: the whole chain, or one link of it.

The idea: a stage that is fed given values is an emulation in which those values replace the computed ones,
so one link costs one run and rounds exactly as the chain does. Values go in rounded to the format that the
stage before would have stored, and come out in the dtype of that format.

Leaves to others: the algorithm and the layout of its stages (`reference.emulation`), the options of a call
(`emulation`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..capture.errors import Refused
from ..reference.emulation import STAGE_TENSORS, EmulationResult
from ..reference.precision import Precision
from ..reference.rounding import FORMATS, round_to
from .fla_stages import INPUTS, OUTPUTS
from .interface import KernelCall


def arguments(call: KernelCall, precision: Precision) -> dict[str, Any]:
    """Arguments of `emulate_chunk` that a call's `stages` or `stage` ask for.

    Raises Refused for a stage that there is not, or one whose values are missing among the call's tensors.
    """
    extra = call.options.extra
    name = extra.get("stage")
    if name is None:
        return {"stages": bool(extra.get("stages"))}
    if name not in INPUTS:
        raise Refused(f"stage {name!r}: the emulation has {', '.join(INPUTS)}")
    missing = [need for need in INPUTS[name] if need not in call.tensors]
    if missing:
        raise Refused(f"stage {name} needs {', '.join(missing)} among the call's tensors")
    given = {need: rounded(call, precision, need) for need in INPUTS[name]}
    return {"stages": True, "overrides": given, "before_overrides": True}


def rounded(call: KernelCall, precision: Precision, name: str) -> Tensor:
    """A given value as the stage before would have stored it, in float32 or float64."""
    wide = torch.float64 if precision.arithmetic == "fp64" else torch.float32
    value = round_to(call.tensors[name].double(), format_at(call, precision, name), precision.mode)
    return value.to(wide)


def format_at(call: KernelCall, precision: Precision, name: str) -> str:
    """Format in which a stage's value is stored."""
    return precision.at(name, call.tensors["q"].dtype, call.tensors["beta"].dtype)


def values_of(call: KernelCall, precision: Precision, result: EmulationResult) -> dict[str, Tensor]:
    """Every stage's value in the dtype that it is stored in (tf32 has none: float32)."""
    return {
        name: result.stages[name].to(FORMATS[format_at(call, precision, name)].dtype or torch.float32)
        for name in STAGE_TENSORS
    }


def outputs_of(call: KernelCall, precision: Precision, result: EmulationResult) -> dict[str, Tensor]:
    """What the one stage gives that the call asked for."""
    everything = {
        **values_of(call, precision, result),
        "output": result.output.to(call.tensors["v"].dtype),
        "final_state": result.final_state.float(),
    }
    return {name: everything[name] for name in OUTPUTS[call.options.extra["stage"]]}
