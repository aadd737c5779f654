"""vLLM's Triton kernels of decode and verify steps: `vllm.verify`, `vllm.decode`, `vllm.packed-decode`.

The idea: one call of the canonical form is one step of the engine's model runner. A verify step has a row of
slots per sequence and starts from the column of the last accepted token (`columns`); packed decode takes one
token per row, so a longer sequence is stepped, call by call, through its slot. Gate and beta are made in the
kernel where the layer lets it (`gate_inputs`).

Read in vllm 0.19.1 gdn_linear_attn.py and 0.33.0 gdn/qwen_gdn_linear_attn.py. Leaves to others: prefill and
the plain recurrent kernel (`vllm`), replays of a captured graph (`replay`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..capture.errors import Refused
from . import layouts
from .columns import ColumnView
from .contract import Contract
from .contracts_decode import vllm_decode, vllm_packed_decode, vllm_verify
from .engine_call import RECURRENT, WITH_COLUMNS, check_rule_call, prepared_qk, rounded_beta, scale_of
from .gate_inputs import GateInputs, gate_inputs
from .interface import KernelCall
from .replay import launched, replay_of
from .slots import SlotView
from .vllm_kernel import VllmKernel


def has_columns(call: KernelCall) -> bool:
    """Whether a call is a verify step: a row of slots per sequence."""
    slots = call.tensors.get("slot_indices")
    return slots is not None and slots.dim() == 2


class Verify(VllmKernel):
    """`fused_recurrent_gated_delta_rule` on columns of slots: a draft and what was accepted of the last."""

    op, submodule = "verify", "fused_recurrent"
    capabilities = WITH_COLUMNS

    @staticmethod
    def contract_for(version: str | None) -> Contract:
        return vllm_verify(version)

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """One verify step. Raises Refused for what the kernel does not take."""
        check_rule_call("vllm.verify", call, self.capabilities)
        tensors = call.tensors
        q, k, in_kernel = prepared_qk(call, default="in_kernel")
        view = ColumnView(
            tensors, layout="VK", state_dtype=call.options.state_dtype, null_slot=self.null_slot
        )
        indices, cu_seqlens = view.indices(), layouts.own_offsets(tensors["cu_seqlens"], torch.int32)
        arguments = {
            "q": layouts.add_batch(q),
            "k": layouts.add_batch(k),
            "v": layouts.add_batch(tensors["v"]),
            "g": layouts.add_batch(tensors["g"]),
            "beta": layouts.add_batch(tensors["beta"]),
            "scale": scale_of(call),
            "initial_state": view.pool,
            "inplace_final_state": True,
            "cu_seqlens": cu_seqlens,
            "ssm_state_indices": indices,
            "num_accepted_tokens": view.accepted.to(torch.int32),
            "use_qk_l2norm_in_kernel": in_kernel,
        }
        output, how = launched(
            lambda: self.module.fused_recurrent_gated_delta_rule(**arguments)[0],
            replay=replay_of(call.options.extra, len(indices)),
            indices=indices,
            offsets=cu_seqlens,
            pool=view.pool,
        )
        self.evidence = {
            "backend": "triton", "l2norm_in_kernel": in_kernel, "null_slot": self.null_slot,
            "columns": view.slots.shape[1], **how,
        }  # fmt: skip
        return {"output": layouts.drop_batch(output), **view.outputs()}


class Decode(VllmKernel):
    """`fused_sigmoid_gating_delta_rule_update`: gate and rule in one kernel, for decode and verify steps."""

    op, submodule = "decode", "fused_sigmoid_gating"
    capabilities = WITH_COLUMNS

    @staticmethod
    def contract_for(version: str | None) -> Contract:
        return vllm_decode(version)

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """One step, of decode or (with columns) of verify. Raises Refused for what it does not take."""
        check_rule_call("vllm.decode", call, self.capabilities)
        tensors = call.tensors
        q, k, in_kernel = prepared_qk(call, default="in_kernel")
        gates = gate_inputs("vllm.decode", tensors)
        cu_seqlens = layouts.own_offsets(tensors["cu_seqlens"], torch.int32)
        view: ColumnView | SlotView
        how: dict[str, Any] = {"layout": "VK", "state_dtype": call.options.state_dtype}
        if has_columns(call):
            view = ColumnView(tensors, **how, null_slot=self.null_slot)
            indices = view.indices()
            accepted = {"num_accepted_tokens": view.accepted.to(torch.int32)}
        else:
            view = SlotView(tensors, **how, null_slot=self.null_slot)
            indices = view.columns(int((cu_seqlens[1:] - cu_seqlens[:-1]).max()))
            accepted = {}
        arguments = {
            "A_log": gates.A_log,
            "a": layouts.add_batch(gates.a),
            "b": layouts.add_batch(gates.b),
            "dt_bias": gates.dt_bias,
            "q": layouts.add_batch(q),
            "k": layouts.add_batch(k),
            "v": layouts.add_batch(tensors["v"]),
            "scale": scale_of(call),
            "initial_state": view.pool,
            "inplace_final_state": True,
            "cu_seqlens": cu_seqlens,
            "ssm_state_indices": indices,
            "use_qk_l2norm_in_kernel": in_kernel,
            **accepted,
        }
        output, ran = launched(
            lambda: self.module.fused_sigmoid_gating_delta_rule_update(**arguments)[0],
            replay=replay_of(call.options.extra, len(indices)),
            indices=indices,
            offsets=cu_seqlens,
            pool=view.pool,
        )
        self.evidence = {
            "backend": "triton", "l2norm_in_kernel": in_kernel, "null_slot": self.null_slot,
            "gate_inputs": "given" if gates.given else "made", **ran,
        }  # fmt: skip
        return {"output": layouts.drop_batch(output), **view.outputs()}


class PackedDecode(VllmKernel):
    """`fused_recurrent_gated_delta_rule_packed_decode`: q|k|v of one token per row, gate in the kernel."""

    op, submodule = "packed-decode", "fused_recurrent"
    capabilities = RECURRENT

    @staticmethod
    def contract_for(version: str | None) -> Contract:
        return vllm_packed_decode(version)

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """One call per token of the longest sequence. Raises Refused for what the kernel does not take."""
        name = "vllm.packed-decode"
        check_rule_call(name, call, self.capabilities)
        check_packed(name, call, self.module)
        rounds_beta = ROUNDS_BETA in (self.files / "fused_recurrent.py").read_text()
        beta = rounded_beta(call.tensors["beta"], call.tensors["q"]) if rounds_beta else None
        gates = gate_inputs(name, call.tensors, beta)
        slots = SlotView(
            call.tensors, layout="VK", state_dtype=call.options.state_dtype, null_slot=self.null_slot
        )
        output, ran = packed_steps(self.module, call, gates, slots)
        self.evidence = {
            "backend": "triton", "null_slot": self.null_slot, "beta_rounded": rounds_beta, **ran,
        }  # fmt: skip
        return {"output": output, **slots.outputs()}


# The packed kernel of 0.19.1 (and of sglang 0.5.23) stores beta in b's dtype before it multiplies.
ROUNDS_BETA = "tl.sigmoid(b_val).to(b.dtype.element_ty)"


def check_packed(name: str, call: KernelCall, module: Any) -> None:
    """Raise Refused where there is no packed kernel, or for a call that is no decode step."""
    if not hasattr(module, "fused_recurrent_gated_delta_rule_packed_decode"):
        raise Refused(f"{name}: this version has no packed decode kernel")
    if has_columns(call):
        raise Refused(f"{name} has one slot per row; slot_indices has a row of columns per sequence")


def packed_steps(
    module: Any, call: KernelCall, gates: GateInputs, slots: SlotView
) -> tuple[Tensor, dict[str, Any]]:
    """(output [T, HV, V], evidence) of the packed kernel, token by token.

    A row that has run out of tokens is left out of the batch, as an engine leaves out what has finished.
    """
    tensors = call.tensors
    q, k, in_kernel = prepared_qk(call, default="in_kernel")
    v = tensors["v"]
    mixed = torch.cat([x.reshape(x.shape[0], -1) for x in (q, k, v)], dim=1).contiguous()
    starts = tensors["cu_seqlens"].long()
    lengths, indices = starts.diff(), slots.indices()
    output = torch.zeros_like(v)
    steps = int(lengths.max())
    replay = replay_of(call.options.extra, len(indices))
    if replay is not None and steps != 1:
        raise Refused(f"replay: a packed batch has one token per row, this call has up to {steps}")
    evidence: dict[str, Any] = {"l2norm_in_kernel": in_kernel, "steps": steps}
    for step in range(steps):
        running = (lengths > step).nonzero().flatten()
        rows = starts[running] + step
        arguments: dict[str, Any] = {
            "mixed_qkv": mixed[rows],
            "a": gates.a[rows],
            "b": gates.b[rows],
            "A_log": gates.A_log,
            "dt_bias": gates.dt_bias,
            "scale": scale_of(call),
            "initial_state": slots.pool,
            "out": v.new_empty(len(rows), 1, *v.shape[1:]),
            "ssm_state_indices": indices[running].contiguous(),
            "use_qk_l2norm_in_kernel": in_kernel,
        }

        def launch(arguments: dict[str, Any] = arguments) -> Tensor:
            made: Tensor = module.fused_recurrent_gated_delta_rule_packed_decode(**arguments)[0]
            return made

        out, how = launched(
            launch, replay=replay, indices=arguments["ssm_state_indices"], offsets=None, pool=slots.pool
        )
        output[rows] = out[:, 0]
        evidence |= how
    return output, evidence


KERNELS = {"verify": Verify, "decode": Decode, "packed-decode": PackedDecode}
