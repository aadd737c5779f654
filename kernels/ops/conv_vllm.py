"""vLLM's Triton convolution: `vllm.conv` (causal_conv1d_fn) and `vllm.conv-update` (causal_conv1d_update).

The idea: the calls are those of vLLM's GDN layer (gdn_linear_attn.py of 0.19.1, gdn/qwen_gdn_linear_attn.py
of 0.33.0): tokens packed, channels side by side in the pool, slots by index, int32 offsets of their own. What
a version takes is read from its signatures: separate slots to read and write (`initial_state_idx`, 0.19.1),
or row 0 as the block of nobody (`null_block_id`, 0.33.0). A decode step writes over its input, a copy here.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor

from ...capture.errors import CannotRun, Refused
from ..engine_call import prepare_triton
from ..interface import KernelCall
from ..layouts import own_offsets
from .conv_call import CONV, ConvAdapter, lengths_of, optional, tokens_each
from .conv_pool import ConvPool

MODULE = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
# Any multiple of the kernel's 8 tokens: with first and last block equal, no state inside the call is stored.
BLOCK_OF_STATES = 16


class VllmConv(ConvAdapter):
    """What both functions share: finding the file in whichever version comes first on sys.path."""

    family = "vllm"
    package = "vllm"
    capabilities = msgspec.structs.replace(CONV, max_tokens_cpu=512)
    # The kernel has branches up to 5, but the one for 5 never multiplies; 0.19.1 and 0.33.0.
    widths = (2, 3, 4)
    separate_slots = True  # where the version has it; see `check_slots`
    function_name: ClassVar[str]

    def __init__(self, version: str | None = None) -> None:
        """Import the kernel's file. Raises CannotRun where its layout is unknown."""
        from ..standins import vllm as standins
        from ..standins.modules import missing_part

        super().__init__(version)
        name = "vllm" if version is None else f"vllm@{version}"
        self.interpreted = prepare_triton()
        standins.install(name)
        try:
            module = import_module(MODULE)
        except ModuleNotFoundError as error:
            raise missing_part(error, name) from error
        function: Any = getattr(module, self.function_name, None)
        if function is None:
            raise CannotRun(f"{name}: {MODULE} has no {self.function_name}")
        self.function = function
        parameters = inspect.signature(function).parameters
        self.null_row = "null_block_id" in parameters
        self.takes_read_slots = "initial_state_idx" in parameters

    def facts(self) -> dict[str, Any]:
        return {"backend": "triton", "interpreted": self.interpreted, "null_row": self.null_row}

    def check_slots(self, pool: ConvPool) -> None:
        """Raise Refused for separate slots where this version has none."""
        if pool.separate and not self.takes_read_slots:
            raise Refused(
                f"vllm.{self.op} {self.version or ''} has no initial_state_idx: it leaves the state where it "
                "was read, and read_slot_indices differs"
            )

    def slot_arguments(self, pool: ConvPool) -> dict[str, Tensor]:
        """How the version is told of separate slots: a row of blocks per sequence, and which are meant."""
        if not pool.separate:
            return {}
        column = torch.zeros(pool.n_sequences, dtype=torch.int32, device=pool.pool.device)
        return {"initial_state_idx": column, "block_idx_last_scheduled_token": column + 1}

    def slots(self, pool: ConvPool) -> Tensor:
        """[N] int32, or [N, 2] where the slots to read and to write differ."""
        if not pool.separate:
            return pool.indices()
        return torch.stack([pool.indices(read=True), pool.indices()], dim=1)


class Prefill(VllmConv):
    """`causal_conv1d_fn`."""

    op = "conv"
    function_name = "causal_conv1d_fn"

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        """One prefill call. Raises Refused for what the kernel does not take."""
        self.check(call)
        tensors = call.tensors
        pool = ConvPool(tensors, channels_last=True, null_row=self.null_row)
        self.check_slots(pool)
        lengths = lengths_of(call)
        empty = [n for n, length in enumerate(lengths) if not length and bool(pool.fresh[n])]
        if empty:
            raise Refused(
                f"vllm.conv: sequence {empty[0]} is empty and fresh; no program runs for it, so its slot "
                "keeps what it held"
            )
        more: dict[str, Any] = self.slot_arguments(pool)
        if more:
            more["block_idx_first_scheduled_token"] = more["block_idx_last_scheduled_token"]
            more["num_computed_tokens"] = torch.zeros_like(more["initial_state_idx"])
            more["block_size_to_align"] = BLOCK_OF_STATES
        output = self.function(
            tensors["conv_input"].contiguous().transpose(0, 1),
            tensors["conv_weight"].contiguous(),
            optional(call, "conv_bias"),
            pool.pool,
            own_offsets(tensors["cu_seqlens"], torch.int32),
            cache_indices=self.slots(pool),
            has_initial_state=~pool.fresh,
            activation="silu",
            **more,
        )
        self.evidence |= {"separate_slots": pool.separate, **pool.evidence()}
        return {"conv_output": output.transpose(0, 1).contiguous(), **pool.outputs()}


class Update(VllmConv):
    """`causal_conv1d_update`: a token of each sequence, or a draft of several."""

    op = "conv-update"
    function_name = "causal_conv1d_update"
    accepts_drafts = True

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        """One decode or verify step. Raises Refused for what the kernel does not take."""
        self.check(call)
        tensors = call.tensors
        pool = ConvPool(tensors, channels_last=True, null_row=self.null_row)
        self.check_slots(pool)
        pool.zero_fresh()
        # The kernel writes its output over its input.
        x = tensors["conv_input"].clone(memory_format=torch.contiguous_format)
        more: dict[str, Any] = dict(self.slot_arguments(pool))
        drafts = "num_accepted" in tensors
        if drafts:
            longest = max(lengths_of(call))
            self._check_drafts(call, pool, longest)
            more["num_accepted_tokens"] = tensors["num_accepted"].to(torch.int32)
            more["query_start_loc"] = own_offsets(tensors["cu_seqlens"], torch.int32)
            more["max_query_len"] = longest
        else:
            n_tokens = tokens_each(call, "vllm.conv-update without num_accepted")
            if n_tokens > 1:
                x = x.view(pool.n_sequences, n_tokens, -1).transpose(1, 2)
        output = self.function(
            x,
            pool.pool,
            tensors["conv_weight"].contiguous(),
            optional(call, "conv_bias"),
            "silu",
            conv_state_indices=self.slots(pool),
            **more,
        )
        if output.dim() == 3:
            output = output.transpose(1, 2).flatten(0, 1)
        self.evidence |= {"separate_slots": pool.separate, "drafts": drafts, **pool.evidence()}
        return {"conv_output": output.contiguous(), **pool.outputs()}

    def _check_drafts(self, call: KernelCall, pool: ConvPool, longest: int) -> None:
        """Raise Refused where a window would leave its row."""
        width = call.tensors["conv_weight"].shape[1]
        if pool.length < width - 1 + longest - 1:
            raise Refused(
                f"vllm.conv-update needs {width + longest - 2} columns of state for {longest} draft tokens, "
                f"and conv_pool has {pool.length}"
            )
        accepted = call.tensors["num_accepted"]
        most = pool.length - width + 2
        if bool(((accepted < 1) | (accepted > most)).any()):
            raise Refused(
                f"vllm.conv-update counts accepted tokens from 1 to {most} here, not {accepted.tolist()}"
            )


KERNELS = {"conv": Prefill, "conv-update": Update}
