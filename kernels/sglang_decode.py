"""SGLang's Triton kernels of decode and verify steps: `sglang.decode`, `.packed-decode`, `.verify`.

The idea: call them as SGLang's backend does (`srt/layers/attention/linear/kernels/gdn_triton.py`, 0.5.23).
Its target verify reads the pool and writes the state after every token into a buffer of its own, from which
the engine copies the accepted one back; here the copy goes to every token's column, so that a verify step of
SGLang and one of vLLM give the same canonical result.

Leaves to others: prefill and the plain recurrent kernel (`sglang`); drafts that are trees.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..capture.errors import CannotRun
from . import layouts
from .columns import ColumnView
from .contract import Capabilities, Contract
from .contracts_decode import sglang_decode, sglang_packed_decode, sglang_verify
from .engine_call import RECURRENT, WITH_COLUMNS, check_rule_call, prepared_qk, rounded_beta, scale_of
from .gate_inputs import gate_inputs
from .interface import KernelCall
from .replay import launched, replay_of
from .sglang_kernel import SglangKernel
from .slots import SlotView
from .vllm_decode import check_packed, packed_steps

FUSED = "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent"


class _Fused(SglangKernel):
    """What decode and verify share: `fused_sigmoid_gating_delta_rule_update`."""

    submodule = "fused_recurrent"
    capabilities: Capabilities = RECURRENT

    def __init__(self, version: str | None = None) -> None:
        """Import the kernels. Raises CannotRun where their layout is unknown."""
        super().__init__(version)
        from .standins.modules import missing_part

        name = "sglang" if version is None else f"sglang@{version}"
        try:
            self.fused = import_module(FUSED)
        except ModuleNotFoundError as error:
            raise missing_part(error, name) from error
        except ImportError as error:
            raise CannotRun(f"{name}: {error}; this version's layout is unknown") from error

    def keywords(self, call: KernelCall) -> dict[str, Any]:
        """The arguments that both take alike."""
        name = f"sglang.{self.op}"
        check_rule_call(name, call, self.capabilities)
        q, k, in_kernel = prepared_qk(call, default="in_kernel")
        gates = gate_inputs(name, call.tensors)
        self.evidence = {
            "backend": "triton", "l2norm_in_kernel": in_kernel,
            "gate_inputs": "given" if gates.given else "made",
        }  # fmt: skip
        return {
            "A_log": gates.A_log,
            "a": gates.a.contiguous(),
            "dt_bias": gates.dt_bias,
            "softplus_beta": 1.0,
            "softplus_threshold": 20.0,
            "q": layouts.add_batch(q),
            "k": layouts.add_batch(k),
            "v": layouts.add_batch(call.tensors["v"]),
            "b": gates.b.contiguous(),
            "scale": scale_of(call),
            "use_qk_l2norm_in_kernel": in_kernel,
            "cu_seqlens": layouts.own_offsets(call.tensors["cu_seqlens"], torch.int32),
        }


class Decode(_Fused):
    """`fused_sigmoid_gating_delta_rule_update`: gate and rule in one kernel, on the pool in place."""

    op = "decode"

    @staticmethod
    def contract_for(version: str | None) -> Contract:
        return sglang_decode(version)

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """One call. Raises Refused for what the kernel does not take."""
        slots = SlotView(call.tensors, layout="VK", state_dtype=call.options.state_dtype)
        keywords, indices = self.keywords(call), slots.indices()
        output, how = launched(
            lambda: self.fused.fused_sigmoid_gating_delta_rule_update(
                **keywords, initial_state_source=slots.pool, initial_state_indices=indices
            ),
            replay=replay_of(call.options.extra, len(indices)),
            indices=indices,
            offsets=keywords["cu_seqlens"],
            pool=slots.pool,
        )
        self.evidence |= how
        return {"output": layouts.drop_batch(output), **slots.outputs()}


class Verify(_Fused):
    """`fused_sigmoid_gating_delta_rule_update` as target verify: the pool is read, states go to a buffer."""

    op = "verify"
    capabilities = msgspec.structs.replace(WITH_COLUMNS, replays=False)

    @staticmethod
    def contract_for(version: str | None) -> Contract:
        return sglang_verify(version)

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """One verify step. Raises Refused for what the kernel does not take."""
        keywords = self.keywords(call)
        view = ColumnView(call.tensors, layout="VK", state_dtype=call.options.state_dtype)
        n, columns = view.slots.shape
        # NaN where the kernel writes nothing: a row that is copied without having been written shows.
        buffer = view.pool.new_full((n, columns, *view.pool.shape[1:]), float("nan"))
        output = self.fused.fused_sigmoid_gating_delta_rule_update(
            **keywords,
            initial_state_source=view.pool,
            initial_state_indices=view.start_indices(),
            disable_state_update=True,
            intermediate_states_buffer=buffer,
            intermediate_state_indices=torch.arange(n, dtype=torch.int32, device=buffer.device),
            cache_steps=columns,
        )
        view.store(buffer)
        self.evidence |= {"columns": columns, "states_copied_from": "intermediate buffer"}
        return {"output": layouts.drop_batch(output), **view.outputs()}


class PackedDecode(SglangKernel):
    """`fused_recurrent_gated_delta_rule_packed_decode`: q|k|v of one token per row, gate in the kernel."""

    op, submodule = "packed-decode", "fused_recurrent"
    capabilities = RECURRENT

    @staticmethod
    def contract_for(version: str | None) -> Contract:
        return sglang_packed_decode(version)

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """One call per token of the longest sequence. Raises Refused for what the kernel does not take."""
        name = "sglang.packed-decode"
        check_rule_call(name, call, self.capabilities)
        check_packed(name, call, self.module)
        gates = gate_inputs(name, call.tensors, rounded_beta(call.tensors["beta"], call.tensors["q"]))
        slots = SlotView(call.tensors, layout="VK", state_dtype=call.options.state_dtype)
        output, ran = packed_steps(self.module, call, gates, slots)
        self.evidence = {"backend": "triton", **ran}
        return {"output": output, **slots.outputs()}


KERNELS = {"verify": Verify, "decode": Decode, "packed-decode": PackedDecode}
