"""The inputs of each operation from a case, and the call that a kernel is given for them.

The idea: a core case holds what every operation of the layer was handed, so one file serves `--op gate`,
`--op norm` and the whole chain. What a capture recorded comes before what the truth would give; the norm's
input, which no case must hold, is the rule's recorded output, else the truth's in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...capture.case import Case
from ...capture.errors import BadInput
from ...kernels.interface import KernelCall, RunOptions
from ...kernels.ops.signature import SIGNATURES
from ..inputs import inputs_of
from .op import Heads, OpInputs, Tensors
from .table import OPS


def heads_of(case: Case) -> Heads | None:
    """(HK, K, HV, V) of a case with a rule's tensors."""
    k, v = case.get("k"), case.get("v")
    if k is None or v is None:
        return None
    return (k.shape[1], k.shape[2], v.shape[1], v.shape[2])


def op_inputs(case: Case, op: str, device: torch.device | str = "cpu") -> OpInputs:
    """What an operation of the layer was handed.

    Raises BadInput where the case does not hold it.
    """
    signature = SIGNATURES[op]
    tensors = {n: case[n] for n in (*signature.inputs, *signature.optional) if case.get(n) is not None}
    if op == "l2norm" and case.options.qk != "raw":
        raise BadInput(
            f"{case.label}: q and k are normalised already; --op l2norm needs a case with raw ones"
        )
    if op == "norm" and "core_output" not in tensors:
        tensors["core_output"] = _core_output(case, device)
    if op in ("split", "post-conv") and "conv_output" not in tensors:
        conv = op_inputs(case, "conv", device)
        native = case["conv_input"].dtype
        tensors["conv_output"] = OPS["conv"].truth(conv)["conv_output"].to(native)
    missing = [name for name in signature.inputs if name not in tensors]
    if missing:
        raise BadInput(
            f"{case.label}: --op {op} needs {', '.join(missing)}; "
            "capture with --what core, or give a case that has them"
        )
    return inputs_from(op, tensors, case, device)


def inputs_from(
    op: str, tensors: Mapping[str, Tensor], case: Case, device: torch.device | str = "cpu"
) -> OpInputs:
    """Tensors of an operation with the case's sequences, heads and eps."""
    moved: Tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    function = OPS[op].function
    if op == "norm":
        function = replace(function, eps=case.options.rms_eps)
    cu = case.get("cu_seqlens")
    if cu is None:
        n_tokens = next(iter(moved.values())).shape[0]
        cu = torch.tensor([0, n_tokens])
    return OpInputs(moved, function, cu.long().to(device), heads_of(case))


def _core_output(case: Case, device: torch.device | str) -> Tensor:
    """The rule's recorded output, else the truth's in the dtype of v."""
    recorded = case.get("observed_output")
    if recorded is not None:
        return recorded
    from ...reference.truth import truth

    output, _ = truth(**inputs_of(case, device).keywords())
    return output.to(case["v"].dtype)


def call_of_op(op: str, inputs: OpInputs) -> KernelCall:
    """The call for a kernel: its tensors on the CPU, and what the operation must be told."""
    eps = getattr(inputs.function, "eps", None)
    tensors = {name: tensor.cpu() for name, tensor in inputs.tensors.items()}
    return KernelCall(tensors=tensors, options=RunOptions(eps=eps, heads=inputs.heads))
