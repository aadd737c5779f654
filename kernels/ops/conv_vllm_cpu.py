"""vLLM's convolution on a CPU: `vllm-cpu.conv` (prefill) and `vllm-cpu.conv-update` (decode).

The idea: which code a layer runs depends on the processor (ops/cpu/gdn_attention.py, 0.32.0). With AVX-512
bfloat16 it is a pair of compiled operators that take width 4 and a repacked weight; anywhere else prefill
is torch's own conv1d, sequence by sequence, and decode another compiled operator. The same choice is made
here, by the operators that the loaded library registers, and told in the evidence.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...capture.errors import CannotRun, Refused
from ..interface import KernelCall
from ..layouts import own_offsets
from ..vllm_cpu import load_library
from .conv_call import CONV, ConvAdapter, lengths_of, optional, tokens_each
from .conv_pool import ConvPool

PACKED = ("causal_conv1d_weight_pack", "causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu")
DECODE = "causal_conv1d_update_cpu_vec"
PACKED_WIDTH, PACKED_CHANNELS = 4, 32  # conv.cpp: causal_conv1d_weight_pack, block_size_n
TORCH_FILE = "vllm/model_executor/layers/mamba/ops/cpu/causal_conv1d.py"


class VllmCpuConv(ConvAdapter):
    """What both operations share: the library and its choice."""

    family = "vllm-cpu"
    package = "vllm-cpu"
    capabilities = msgspec.structs.replace(CONV, devices=("cpu",))

    def __init__(self, version: str | None = None) -> None:
        """Load the library. Raises CannotRun where that fails."""
        super().__init__(version)
        self.library = load_library("vllm-cpu" if version is None else f"vllm-cpu@{version}")
        self.packed = all(hasattr(torch.ops._C, name) for name in PACKED)

    def facts(self) -> dict[str, Any]:
        backend = "compiled" if self.packed or self.op == "conv-update" else "torch"
        return {"backend": backend, "library": self.library.name, "packed_weight": self.packed}

    def packed_weight(self, call: KernelCall) -> Tensor:
        """The weight as the operators with a packed weight take it. Raises Refused where they take none."""
        weight = call.tensors["conv_weight"]
        n_channels, width = weight.shape
        if call.tensors["conv_input"].dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
            raise Refused(f"vllm-cpu.{self.op} takes bfloat16 here")
        if width != PACKED_WIDTH or n_channels % PACKED_CHANNELS:
            raise Refused(
                f"vllm-cpu.{self.op} takes width {PACKED_WIDTH} and a multiple of {PACKED_CHANNELS} channels "
                f"here, not {width} and {n_channels}"
            )
        packed: Tensor = torch.ops._C.causal_conv1d_weight_pack(weight.contiguous())
        return packed

    def no_padding(self, pool: ConvPool) -> None:
        """Raise Refused for padded rows where the operator does not know them."""
        if bool((pool.slots < 0).any()):
            raise Refused(f"vllm-cpu.{self.op} has no padded rows here; slot_indices has a negative index")


class Prefill(VllmCpuConv):
    """`causal_conv1d_fwd_cpu`, or torch's conv1d as the layer falls back to."""

    op = "conv"

    def __init__(self, version: str | None = None) -> None:
        super().__init__(version)
        self.torch_function = None if self.packed else _torch_function(self.version)

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        """One prefill call. Raises Refused for what the code does not take."""
        self.check(call)
        tensors, offsets = call.tensors, own_offsets(call.tensors["cu_seqlens"], torch.int32)
        pool = ConvPool(tensors, channels_last=True)
        self._check_empty(call, pool)
        x = tensors["conv_input"].contiguous().transpose(0, 1)
        bias = optional(call, "conv_bias")
        if self.torch_function is not None:
            output = self.torch_function(
                x,
                tensors["conv_weight"].contiguous(),
                bias,
                pool.pool,
                offsets,
                cache_indices=pool.indices(),
                has_initial_state=~pool.fresh,
                activation="silu",
            )
        else:
            self.no_padding(pool)
            output = torch.ops._C.causal_conv1d_fwd_cpu(
                x,
                self.packed_weight(call),
                bias,
                pool.pool,
                offsets,
                pool.indices(),
                ~pool.fresh,
                True,
                -1,
                True,
            )
        return {"conv_output": output.transpose(0, 1).contiguous(), **pool.outputs()}

    def _check_empty(self, call: KernelCall, pool: ConvPool) -> None:
        for n, length in enumerate(lengths_of(call)):
            if not length and bool(pool.fresh[n]):
                raise Refused(
                    f"vllm-cpu.conv: sequence {n} is empty and fresh; it is passed over, and its slot keeps "
                    "what it held"
                )


class Update(VllmCpuConv):
    """`causal_conv1d_update_cpu`, or `causal_conv1d_update_cpu_vec` without the packed weight."""

    op = "conv-update"

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        """One decode step per token. Raises Refused for what the operator does not take."""
        self.check(call)
        tensors = call.tensors
        # The operator without a packed weight takes slot 0 for the block of nobody (NULL_BLOCK_ID).
        pool = ConvPool(tensors, channels_last=True, null_row=not self.packed)
        pool.zero_fresh()
        n_tokens, bias, outputs = tokens_each(call, "vllm-cpu.conv-update"), optional(call, "conv_bias"), []
        x = tensors["conv_input"].view(pool.n_sequences, n_tokens, -1)
        if self.packed:
            self.no_padding(pool)
            weight = self.packed_weight(call)
        for step in range(n_tokens):
            row = x[:, step].clone(memory_format=torch.contiguous_format)
            if self.packed:
                output = torch.ops._C.causal_conv1d_update_cpu(
                    row, pool.pool, weight, bias, True, None, pool.indices(), -1, True
                )
            else:
                output = getattr(torch.ops._C, DECODE)(
                    row, pool.pool, tensors["conv_weight"].contiguous(), bias, "silu", pool.indices(), None, 0
                )
            outputs.append(output)
        self.evidence |= pool.evidence()
        return {"conv_output": torch.stack(outputs, dim=1).flatten(0, 1), **pool.outputs()}


def _torch_function(version: str | None) -> Any:
    """`causal_conv1d_fn_cpu` from vLLM's file. Raises CannotRun where the file is not there."""
    from ..standins.modules import bare_packages, stand_in

    for directory in sys.path:
        if directory and Path(directory, TORCH_FILE).is_file():
            break
    else:
        raise CannotRun(
            "vllm-cpu.conv: this processor has no AVX-512 bfloat16, so the layer runs "
            f"{TORCH_FILE}, which the cache does not keep; run: make engine-env"
        )
    package = TORCH_FILE.removesuffix("/causal_conv1d.py").replace("/", ".")
    bare_packages(Path(directory), package)
    bare_packages(Path(directory), "vllm.v1.attention.backends")
    stand_in("vllm._custom_ops", causal_conv1d_update_cpu_vec=getattr(torch.ops._C, DECODE, None))
    stand_in("vllm.v1.attention.backends.utils", PAD_SLOT_ID=-1, NULL_BLOCK_ID=0)
    return import_module(f"{package}.causal_conv1d").causal_conv1d_fn_cpu


KERNELS = {"conv": Prefill, "conv-update": Update}
