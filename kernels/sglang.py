"""SGLang's Triton kernels of the rule: `sglang.chunk` (extend) and `sglang.recurrent`, on the pool in place.

The idea: both kernels get the whole pool and the sequences' slot numbers, as SGLang's backend passes
them (`srt/layers/attention/linear/kernels/gdn_triton.py`); neither knows has_initial_state, so a fresh
sequence's slot is zeroed before, as SGLang does when it hands a slot out.

Leaves to others: the stand-ins (`standins.sglang`), its FlashInfer, CuTe and CPU backends.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..capture.errors import CannotRun, Refused
from . import autotune, layouts
from .contract import Capabilities, Contract
from .contracts_engines import sglang_chunk, sglang_recurrent
from .engine_call import (
    check_no_empty,
    check_rule_call,
    prepare_triton,
    prepared_qk,
    rounded_beta,
    scale_of,
)
from .interface import KernelCall, KernelInfo
from .slots import SlotView

CHUNK = 64
LARGEST_KEY = 256


class _SglangKernel:
    """What both kernels share: loading the folder that comes first on sys.path."""

    package = "sglang"
    op = ""
    submodule = ""
    capabilities: Capabilities

    def __init__(self, version: str | None = None) -> None:
        """Import the kernels. Raises CannotRun where their layout is unknown."""
        from .standins import sglang as standins
        from .standins.modules import missing_part

        self.version = version
        name = "sglang" if version is None else f"sglang@{version}"
        self.interpreted = prepare_triton()
        self.root, self.folder = standins.install(name)
        try:
            self.module = import_module(f"{self.folder}.{self.submodule}")
            self.utils = import_module(f"{self.folder}.utils")
        except ModuleNotFoundError as error:
            raise missing_part(error, name) from error
        self.evidence: dict[str, Any] = {}

    def describe(self) -> KernelInfo:
        name = f"sglang.{self.op}" + (f"@{self.version}" if self.version else "")
        return KernelInfo(
            name=name,
            version=self.version,
            capabilities=self.capabilities,
            contract=msgspec.structs.replace(self.contract_for(self.version), kernel=name),
            environment={"backend": "triton", "interpreted": self.interpreted, "kernels": self.folder},
        )

    @staticmethod
    def contract_for(version: str | None) -> Contract:
        raise CannotRun("no kernel")

    def _shared(self, call: KernelCall) -> dict[str, Any]:
        """The arguments that both kernels take alike."""
        q, k, in_kernel = prepared_qk(call, default="in_kernel")
        self.evidence = {"backend": "triton", "l2norm_in_kernel": in_kernel}
        return {
            "q": layouts.add_batch(q),
            "k": layouts.add_batch(k),
            "v": layouts.add_batch(call.tensors["v"]),
            "g": layouts.add_batch(call.tensors["g"]),
            "scale": scale_of(call),
            "cu_seqlens": layouts.own_offsets(call.tensors["cu_seqlens"], torch.int32),
            "use_qk_l2norm_in_kernel": in_kernel,
        }


class Chunk(_SglangKernel):
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
        arguments = self._shared(call)
        # gdn_gating stores beta as float32 after rounding it to the model's dtype.
        beta = rounded_beta(call.tensors["beta"], arguments["q"]).float()
        slots = SlotView(call.tensors, layout="VK", state_dtype=call.options.state_dtype)
        with autotune.pinned(call.options.pins) as launched:
            output, _, _ = self.module.chunk_gated_delta_rule(
                **arguments,
                beta=layouts.add_batch(beta),
                initial_state=slots.pool,
                initial_state_indices=slots.indices(),
            )
        self.evidence["launched"] = dict(launched)
        return {"output": layouts.drop_batch(output), **slots.outputs()}


class Recurrent(_SglangKernel):
    """`fused_recurrent_gated_delta_rule_update`: token by token in float32."""

    op, submodule = "recurrent", "fused_recurrent"
    capabilities = Capabilities(
        default_chunk_size=None,
        state_layout="VK",
        l2norm="both",
        state_dtypes=("float32", "bfloat16", "float16"),
        slots=True,
        profile="fla-recurrent",
        max_tokens_cpu=256,
    )

    @staticmethod
    def contract_for(version: str | None) -> Contract:
        return sglang_recurrent(version)

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """One call. Raises Refused for what the kernel does not take."""
        check_rule_call("sglang.recurrent", call, self.capabilities)
        slots = SlotView(call.tensors, layout="VK", state_dtype=call.options.state_dtype)
        output = self.module.fused_recurrent_gated_delta_rule_update(
            **self._shared(call),
            beta=layouts.add_batch(call.tensors["beta"]),
            initial_state_source=slots.pool,
            initial_state_indices=slots.indices(),
        )
        return {"output": layouts.drop_batch(output), **slots.outputs()}


KERNELS = {"chunk": Chunk, "recurrent": Recurrent}
