"""SGLang's Triton kernels of the rule: `sglang.chunk` (extend) and `sglang.recurrent`, on the pool in place.

The idea: both kernels get the whole pool and the sequences' slot numbers, as SGLang's backend passes
them (`srt/layers/attention/linear/kernels/gdn_triton.py`); neither knows has_initial_state, so a fresh
sequence's slot is zeroed before, as SGLang does when it hands a slot out.

Leaves to others: decode and verify steps (`sglang_decode`), the stand-ins (`standins.sglang`), its
FlashInfer, CuTe and CPU backends.
"""

from __future__ import annotations

from torch import Tensor

from ..capture.errors import Refused
from . import autotune, layouts, sglang_decode
from .contract import Capabilities, Contract
from .contracts_engines import sglang_chunk, sglang_recurrent
from .engine_call import RECURRENT, check_no_empty, check_rule_call, rounded_beta
from .interface import KernelCall
from .replay import launched, replay_of
from .sglang_kernel import SglangKernel
from .slots import SlotView

CHUNK = 64
LARGEST_KEY = 256


class Chunk(SglangKernel):
    """`chunk_gated_delta_rule`: kkt and solve in one kernel, chunks of 64."""

    op, submodule = "chunk", "chunk"
    capabilities = Capabilities(
        default_chunk_size=CHUNK,
        state_layout="VK",
        l2norm="both",
        input_dtypes=("bfloat16", "float16"),
        state_dtypes=("float32", "bfloat16", "float16"),
        slots=True,
        profile="sglang-0.5",
        checkpoints="chunks",
        pins=(
            "chunk_gated_delta_rule_fwd_kkt_solve_kernel", "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        ),
        max_tokens_cpu=2048,
    )  # fmt: skip

    @staticmethod
    def contract_for(version: str | None) -> Contract:
        return sglang_chunk(version)

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """One extend call. Raises Refused for what the kernel does not take."""
        check_rule_call("sglang.chunk", call, self.capabilities)
        check_no_empty("sglang.chunk", call)
        if call.tensors["k"].shape[-1] > LARGEST_KEY:
            raise Refused(f"sglang.chunk holds K <= {LARGEST_KEY}, not {call.tensors['k'].shape[-1]}")
        arguments = self.shared(call)
        # gdn_gating stores beta as float32 after rounding it to the model's dtype.
        beta = rounded_beta(call.tensors["beta"], arguments["q"]).float()
        slots = SlotView(call.tensors, layout="VK", state_dtype=call.options.state_dtype)
        with autotune.pinned(call.options.pins) as launched:
            output, _, states = self.module.chunk_gated_delta_rule(
                **arguments,
                beta=layouts.add_batch(beta),
                initial_state=slots.pool,
                initial_state_indices=slots.indices(),
            )
        self.evidence["launched"] = dict(launched)
        found = {"output": layouts.drop_batch(output), **slots.outputs()}
        if call.options.extra.get("checkpoints"):
            found["checkpoints"] = layouts.vk_to_kv(layouts.drop_batch(states))
        return found


class Recurrent(SglangKernel):
    """`fused_recurrent_gated_delta_rule_update`: token by token in float32."""

    op, submodule = "recurrent", "fused_recurrent"
    capabilities = RECURRENT

    @staticmethod
    def contract_for(version: str | None) -> Contract:
        return sglang_recurrent(version)

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """One call. Raises Refused for what the kernel does not take."""
        check_rule_call("sglang.recurrent", call, self.capabilities)
        slots = SlotView(call.tensors, layout="VK", state_dtype=call.options.state_dtype)
        arguments, indices = self.shared(call), slots.indices()
        beta = layouts.add_batch(call.tensors["beta"])
        output, how = launched(
            lambda: self.module.fused_recurrent_gated_delta_rule_update(
                **arguments, beta=beta, initial_state_source=slots.pool, initial_state_indices=indices
            ),
            replay=replay_of(call.options.extra, len(indices)),
            indices=indices,
            offsets=arguments["cu_seqlens"],
            pool=slots.pool,
        )
        self.evidence |= how
        return {"output": layouts.drop_batch(output), **slots.outputs()}


KERNELS = {"chunk": Chunk, "recurrent": Recurrent, **sglang_decode.KERNELS}
