"""The CUDA package causal-conv1d: `causal-conv1d.conv` (`causal_conv1d_fn`) and `.conv-update`.

The idea: the package's Python functions are called as its users do (read in 1.6.0:
causal_conv1d_interface.py, causal_conv1d_varlen.py, csrc/*.cu), channels last. It takes packed sequences by
a sequence number per token, but then neither a state to start from nor one to leave behind; so a call whose
sequences all start afresh is packed, with the states made by the package's own `causal_conv1d_varlen_states`,
and any other call is cut into one call per sequence. Decode addresses a pool by index; a negative one is a
padded row.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...capture.errors import CannotRun, Refused
from ..interface import KernelCall
from .conv_call import CONV, ConvAdapter, optional, tokens_each
from .conv_pool import ConvPool

CHANNEL_BLOCK = 8  # causal_conv1d.cpp: "channel dimension divisible by 8"


class CudaConv(ConvAdapter):
    """What both functions share."""

    family = "causal-conv1d"
    package = "causal-conv1d"
    capabilities = msgspec.structs.replace(CONV, devices=("cuda",))

    def __init__(self, version: str | None = None) -> None:
        """Import the package. Raises CannotRun where it is missing or another version."""
        super().__init__(version)
        try:
            import causal_conv1d
            from causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states
        except ImportError as error:
            raise CannotRun(
                f"causal-conv1d cannot be imported ({error}); it is compiled when it is installed and needs "
                "nvcc: pip install 'gdncheck[conv]', or see bench/h200/build_causal_conv1d.py"
            ) from error
        found = str(causal_conv1d.__version__)
        if version is not None and found.partition("+")[0] != version.partition("+")[0]:
            raise CannotRun(f"causal-conv1d {version} was asked for but sys.path leads to {found}")
        self.version = found
        self.package_module: Any = causal_conv1d
        self.varlen_states: Any = causal_conv1d_varlen_states

    def facts(self) -> dict[str, Any]:
        return {"backend": "cuda", "interpreted": False}


class Prefill(CudaConv):
    """`causal_conv1d_fn`."""

    op = "conv"
    separate_slots = True  # rows are gathered and put back: any slot will do

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        """One call, packed or per sequence. Raises Refused for what the kernel does not take."""
        self.check(call)
        tensors = call.tensors
        n_channels = tensors["conv_weight"].shape[0]
        if n_channels % CHANNEL_BLOCK:
            raise Refused(
                f"causal-conv1d.conv takes a multiple of {CHANNEL_BLOCK} channels, not {n_channels}"
            )
        pool = ConvPool(tensors, channels_last=True, dtype=tensors["conv_input"].dtype)
        packed = bool(pool.fresh.all()) and pool.n_sequences > 1
        self.evidence["packing"] = "seq_idx" if packed else "one call per sequence"
        output, states = (self._packed if packed else self._each)(call, pool)
        pool.scatter(states)
        return {"conv_output": output, **pool.outputs()}

    def _packed(self, call: KernelCall, pool: ConvPool) -> tuple[Tensor, Tensor]:
        tensors = call.tensors
        x, cu_seqlens = tensors["conv_input"].contiguous(), tensors["cu_seqlens"]
        numbers = torch.arange(pool.n_sequences, dtype=torch.int32, device=x.device)
        seq_idx = torch.repeat_interleave(numbers, cu_seqlens.diff(), output_size=x.shape[0])
        output = self.package_module.causal_conv1d_fn(
            x[None].transpose(1, 2),
            tensors["conv_weight"].contiguous(),
            optional(call, "conv_bias"),
            seq_idx=seq_idx[None],
            activation="silu",
        )
        states = self.varlen_states(x, cu_seqlens.to(torch.int32), tensors["conv_weight"].shape[1] - 1)
        return output[0].transpose(0, 1).contiguous(), states

    def _each(self, call: KernelCall, pool: ConvPool) -> tuple[Tensor, Tensor]:
        tensors, states = call.tensors, pool.gathered()
        outputs = [tensors["conv_input"][:0]]
        for n, (start, end) in enumerate(itertools.pairwise(tensors["cu_seqlens"].tolist())):
            if start == end:
                continue
            # Channels last: the tokens of one channel lie D apart, in the input as in the state.
            state = states[n : n + 1].transpose(1, 2).contiguous().transpose(1, 2)
            output, final = self.package_module.causal_conv1d_fn(
                tensors["conv_input"][start:end].contiguous()[None].transpose(1, 2),
                tensors["conv_weight"].contiguous(),
                optional(call, "conv_bias"),
                initial_states=None if bool(pool.fresh[n]) else state,
                return_final_states=True,
                activation="silu",
            )
            outputs.append(output[0].transpose(0, 1))
            states[n] = final[0]
        return torch.cat(outputs), states


class Update(CudaConv):
    """`causal_conv1d_update`."""

    op = "conv-update"

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        """One call of one token or more per sequence. Raises Refused for what the kernel does not take."""
        self.check(call)
        tensors = call.tensors
        n_tokens = tokens_each(call, "causal-conv1d.conv-update")
        pool = ConvPool(tensors, channels_last=True, dtype=tensors["conv_input"].dtype)
        pool.zero_fresh()
        x = tensors["conv_input"].contiguous().view(pool.n_sequences, n_tokens, -1)
        output = self.package_module.causal_conv1d_update(
            x.transpose(1, 2),
            pool.pool,
            tensors["conv_weight"].contiguous(),
            optional(call, "conv_bias"),
            activation="silu",
            conv_state_indices=pool.indices(),
        )
        return {"conv_output": output.transpose(1, 2).flatten(0, 1).contiguous(), **pool.outputs()}


KERNELS = {"conv": Prefill, "conv-update": Update}
