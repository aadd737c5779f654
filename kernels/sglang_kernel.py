"""What all adapters of SGLang's Triton kernels share: finding the kernel folder and telling what it is.

Leaves to others: the calls (`sglang`, `sglang_decode`), the stand-ins (`standins.sglang`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import msgspec
import torch

from ..capture.errors import CannotRun
from . import layouts
from .contract import Capabilities, Contract
from .engine_call import prepare_triton, prepared_qk, scale_of
from .interface import KernelCall, KernelInfo


class SglangKernel:
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

    def shared(self, call: KernelCall) -> dict[str, Any]:
        """The arguments that all kernels of given g and beta take alike."""
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
