"""What every adapter of a convolution does with a call before its kernel sees it.

The idea: each refusal is one line that names the offending value, so that a wrong result never comes from
an argument that a kernel would have quietly ignored. Channels and widths that a kernel takes are class data.

Leaves to others: the layout of the state (`conv_pool`), the calls (`conv_fla`, `conv_vllm`, ...).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ...capture.errors import Refused
from ..contract import Capabilities, Contract
from ..interface import KernelCall
from ..layouts import dtype_name
from .adapter import OpAdapter

CONV = Capabilities(default_chunk_size=None, slots=True)


class ConvAdapter(OpAdapter):
    """A convolution of one family."""

    op = "conv"
    read = "conv_input"
    capabilities: ClassVar[Capabilities] = CONV
    widths: ClassVar[tuple[int, ...]] = (2, 3, 4)
    """Values of W that the kernel takes; empty: any."""
    separate_slots: ClassVar[bool] = False
    """Can a sequence leave its state in another slot than it started from."""
    accepts_drafts: ClassVar[bool] = False
    """Takes `num_accepted`."""

    @classmethod
    def contract_for(cls, version: str | None) -> Contract:
        """The contract of this convolution at a version (data only)."""
        from .contracts_conv import contract_for

        return contract_for(f"{cls.family}.{cls.op}", version)

    def check(self, call: KernelCall) -> None:
        """Raise Refused for a call that the kernel cannot take as asked."""
        tensors, name = call.tensors, f"{self.family}.{self.op}"
        x, weight = tensors["conv_input"], tensors["conv_weight"]
        if weight.dim() != 2 or x.dim() != 2 or weight.shape[0] != x.shape[1]:
            raise Refused(f"{name}: conv_weight {list(weight.shape)} does not fit input {list(x.shape)}")
        if self.widths and weight.shape[1] not in self.widths:
            known = ", ".join(map(str, self.widths))
            raise Refused(f"{name} takes kernels of width {known}, not {weight.shape[1]}")
        if dtype_name(weight.dtype) not in self.capabilities.input_dtypes:
            raise Refused(f"{name}: conv_weight in {dtype_name(weight.dtype)} is not taken")
        if x.shape[0] == 0 or len(tensors["cu_seqlens"]) < 2:
            raise Refused(f"{name} is never called without a token")
        for past in ("conv_state", "conv_pool"):
            if past in tensors and tensors[past].dtype != x.dtype:
                kept = dtype_name(tensors[past].dtype)
                raise Refused(f"{name} keeps its state in the input's {dtype_name(x.dtype)}, not {kept}")
        if "num_accepted" in tensors and not self.accepts_drafts:
            raise Refused(f"{name} takes no draft tokens (num_accepted)")
        read = tensors.get("read_slot_indices")
        if read is not None and not self.separate_slots and not torch.equal(read, tensors["slot_indices"]):
            raise Refused(f"{name} leaves the state where it was read; read_slot_indices differs")

    def check_no_empty(self, call: KernelCall, why: str) -> None:
        """Raise Refused for an empty sequence. why: what the kernel would do with it."""
        lengths = lengths_of(call)
        if 0 in lengths and not call.options.extra.get("allow_empty"):
            raise Refused(f"{self.family}.{self.op}: sequence {lengths.index(0)} is empty; {why}")


def lengths_of(call: KernelCall) -> list[int]:
    """Tokens of each sequence."""
    lengths: list[int] = call.tensors["cu_seqlens"].diff().tolist()
    return lengths


def tokens_each(call: KernelCall, name: str) -> int:
    """Tokens that every sequence has. Raises Refused where they differ."""
    lengths = lengths_of(call)
    if len(set(lengths)) != 1 or not lengths[0]:
        raise Refused(f"{name} takes the same number of tokens, 1 or more, of each sequence, not {lengths}")
    return lengths[0]


def optional(call: KernelCall, name: str) -> Tensor | None:
    """A contiguous copy of an optional tensor."""
    value: Any = call.tensors.get(name)
    return None if value is None else value.contiguous()
