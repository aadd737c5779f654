"""vLLM's Triton kernels of the rule: `vllm.chunk` (prefill) and `vllm.recurrent` (decode, slots in place).

The idea: call the kernels as vLLM's layer does (layer files named in `contracts_engines`), with nothing
of vLLM but its kernel folder: 1 x T packed tensors, unexpanded heads, int32 cu_seqlens of their own,
states as [V, K], taken from and put back into a pool in the pool's dtype. The stand-ins that the folder
needs are in `standins.vllm`.

Leaves to others: the FlashInfer backend that vLLM prefers on SM90 (`flashinfer`), vLLM's CPU kernels
(`vllm_cpu`), its convolution, the kernels of decode and verify steps (`vllm_decode`).
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from ..capture.errors import Refused
from . import autotune, layouts, vllm_decode
from .contract import Capabilities, Contract
from .contracts_engines import vllm_chunk, vllm_recurrent
from .engine_call import RECURRENT, check_no_empty, check_rule_call, prepared_qk, rounded_beta, scale_of
from .interface import KernelCall
from .replay import launched, replay_of
from .slots import SlotView
from .vllm_kernel import VllmKernel

CHUNK = 64
LARGEST_KEY = 256


class Chunk(VllmKernel):
    """`chunk_gated_delta_rule`: six Triton kernels, chunks of 64."""

    op, submodule = "chunk", "chunk"
    capabilities = Capabilities(
        default_chunk_size=CHUNK,
        state_layout="VK",
        l2norm="both",
        input_dtypes=("bfloat16", "float16"),
        state_dtypes=("float32", "bfloat16", "float16"),
        slots=True,
        profile="vllm-0.19",
        stages=("cumsum", "kkt", "solve", "wu", "state", "output"),
        checkpoints="chunks",
        pins=(
            "chunk_local_cumsum_scalar_kernel", "chunk_scaled_dot_kkt_fwd_kernel",
            "merge_16x16_to_64x64_inverse_kernel", "recompute_w_u_fwd_kernel",
            "chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "chunk_fwd_kernel_o",
        ),
        max_tokens_cpu=2048,
    )  # fmt: skip

    def own_capabilities(self) -> Capabilities:
        profile = "fla-0.4" if self.wide_kkt else "vllm-0.19"
        return msgspec.structs.replace(self.capabilities, profile=profile)

    @staticmethod
    def contract_for(version: str | None) -> Contract:
        return vllm_chunk(version)

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """One prefill call. Raises Refused for what the kernel does not take.

        `extra["stages"]` gives every stage's value, `extra["stage"]` runs one stage on given inputs.
        """
        check_rule_call("vllm.chunk", call, self.capabilities)
        check_no_empty("vllm.chunk", call)
        if call.tensors["k"].shape[-1] > LARGEST_KEY:
            raise Refused(f"vllm.chunk holds K <= {LARGEST_KEY}, not {call.tensors['k'].shape[-1]}")
        options, extra = call.options, call.options.extra
        slots = SlotView(call.tensors, layout="VK", state_dtype=options.state_dtype)
        arguments = self.keywords(call, slots)
        self.evidence = {"backend": "triton", "l2norm_in_kernel": arguments["use_qk_l2norm_in_kernel"]}
        with autotune.pinned(options.pins) as launched:
            self.evidence["launched"] = launched
            if "stage" in extra or extra.get("stages") or extra.get("checkpoints"):
                return self._stages(call, arguments)
            output, final_state = self.module.chunk_gated_delta_rule(**arguments)
        self.evidence["launched"] = dict(launched)
        slots.scatter(final_state)
        return {"output": layouts.drop_batch(output), **slots.outputs()}

    def keywords(self, call: KernelCall, slots: SlotView) -> dict[str, Any]:
        """The arguments as vLLM's layer passes them."""
        tensors = call.tensors
        q, k, in_kernel = prepared_qk(call, default="before" if self.second_generation else "in_kernel")
        beta = tensors["beta"].float() if self.second_generation else rounded_beta(tensors["beta"], q)
        return {
            "q": layouts.add_batch(q),
            "k": layouts.add_batch(k),
            "v": layouts.add_batch(tensors["v"]),
            "g": layouts.add_batch(tensors["g"]),
            "beta": layouts.add_batch(beta),
            "scale": scale_of(call),
            "initial_state": slots.gathered(),
            "output_final_state": True,
            "cu_seqlens": layouts.own_offsets(tensors["cu_seqlens"], torch.int32),
            "use_qk_l2norm_in_kernel": in_kernel,
        }

    def _stages(self, call: KernelCall, arguments: dict[str, Any]) -> dict[str, Tensor]:
        from . import fla_stages
        from .engine_stages import VllmStages

        package: Any = VllmStages(self.folder, self.version)
        arguments = {**arguments, "initial_state": layouts.vk_to_kv(arguments["initial_state"])}
        if "stage" in call.options.extra:
            return fla_stages.run_stage(package, call.options.extra["stage"], call, arguments)
        values = fla_stages.stages(package, arguments, CHUNK, call.options)
        return fla_stages.with_checkpoints(values) if call.options.extra.get("checkpoints") else values


class Recurrent(VllmKernel):
    """`fused_recurrent_gated_delta_rule` on slots, as decode and verify steps run it."""

    op, submodule = "recurrent", "fused_recurrent"
    capabilities = RECURRENT

    @staticmethod
    def contract_for(version: str | None) -> Contract:
        return vllm_recurrent(version)

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """One call; the kernel writes the state after every token into the sequence's slot.

        Raises Refused for what the kernel does not take.
        """
        check_rule_call("vllm.recurrent", call, self.capabilities)
        tensors = call.tensors
        q, k, in_kernel = prepared_qk(call, default="in_kernel")
        null_slot = self.null_slot
        slots = SlotView(tensors, layout="VK", state_dtype=call.options.state_dtype, null_slot=null_slot)
        cu_seqlens = layouts.own_offsets(tensors["cu_seqlens"], torch.int32)
        # A row of slots per sequence, one for each of its tokens.
        indices = slots.columns(int((cu_seqlens[1:] - cu_seqlens[:-1]).max()))
        arguments = {
            "q": layouts.add_batch(q),
            "k": layouts.add_batch(k),
            "v": layouts.add_batch(tensors["v"]),
            "g": layouts.add_batch(tensors["g"]),
            "beta": layouts.add_batch(tensors["beta"]),
            "scale": scale_of(call),
            "initial_state": slots.pool,
            "inplace_final_state": True,
            "cu_seqlens": cu_seqlens,
            "ssm_state_indices": indices,
            "use_qk_l2norm_in_kernel": in_kernel,
        }
        output, how = launched(
            lambda: self.module.fused_recurrent_gated_delta_rule(**arguments)[0],
            replay=replay_of(call.options.extra, len(indices)),
            indices=indices,
            offsets=cu_seqlens,
            pool=slots.pool,
        )
        self.evidence = {"backend": "triton", "l2norm_in_kernel": in_kernel, "null_slot": null_slot, **how}
        return {"output": layouts.drop_batch(output), **slots.outputs()}


KERNELS = {"chunk": Chunk, "recurrent": Recurrent, **vllm_decode.KERNELS}
