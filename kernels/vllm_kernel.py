"""What all adapters of vLLM's Triton kernels share: finding the kernel folder and telling what it is.

The idea: nothing of vLLM is loaded but its kernel folder (stand-ins in `standins.vllm`), from whichever
version comes first on sys.path; what differs between versions is read in the kernel files themselves, so
that a tree without a version is known too.

Leaves to others: the calls (`vllm`, `vllm_decode`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import msgspec
import torch

from ..capture.errors import CannotRun
from .contract import Capabilities, Contract
from .contracts_engines import VLLM, VLLM_FIRST
from .engine_call import prepare_triton
from .interface import KernelInfo

# With 0.20.0 came the operation that normalises q and k and makes g and beta before the rule, and with it
# slot 0 as a block that nobody owns; with 0.21.0 k * beta keeps the wider dtype of the two in kkt.
PREPARES_BEFORE = ("fused_gdn_prefill_post_conv.py", "0.20.0")
WIDE_KKT = ("tl.trans(b_k).to(b_kb.dtype)", "0.21.0")
NULL_SLOT = "if state_idx <= 0:"


class VllmKernel:
    """What both kernels share: loading the folder from whichever version comes first on sys.path."""

    package = "vllm"
    op = ""
    submodule = ""
    capabilities: Capabilities

    def __init__(self, version: str | None = None) -> None:
        """Import the kernels. Raises CannotRun where their layout is unknown."""
        from .standins import vllm as standins
        from .standins.modules import missing_part

        self.version = version
        name = "vllm" if version is None else f"vllm@{version}"
        self.interpreted = prepare_triton()
        self.root, self.folder = standins.install(name)
        self.files = self.root.joinpath(*self.folder.split("."))
        try:
            self.module = import_module(f"{self.folder}.{self.submodule}")
        except ModuleNotFoundError as error:
            raise missing_part(error, name) from error
        _give_scratch_memory()
        self.evidence: dict[str, Any] = {}

    @property
    def second_generation(self) -> bool:
        """Whether the layer prepares q, k, g and beta before the rule (0.20.0 and newer)."""
        return (self.files / PREPARES_BEFORE[0]).is_file()

    @property
    def wide_kkt(self) -> bool:
        """Whether kkt multiplies in the wider dtype of k and beta (0.21.0 and newer)."""
        return WIDE_KKT[0] in (self.files / "chunk_scaled_dot_kkt.py").read_text()

    @property
    def null_slot(self) -> bool:
        """Whether the recurrent kernels skip slot 0 as they skip a padding index (0.20.0 and newer)."""
        return NULL_SLOT in (self.files / "fused_recurrent.py").read_text()

    def describe(self) -> KernelInfo:
        name = f"vllm.{self.op}" + (f"@{self.version}" if self.version else "")
        utils = import_module(f"{self.folder}.utils")
        return KernelInfo(
            name=name,
            version=self.version,
            capabilities=self.own_capabilities(),
            contract=msgspec.structs.replace(self.contract_for(self._nominal_version()), kernel=name),
            environment={
                "backend": "triton",
                "interpreted": self.interpreted,
                "kernels": self.folder,
                "tma_in_solve": bool(getattr(utils, "is_tma_supported", False)),
            },
        )

    def _nominal_version(self) -> str:
        """The version whose contract the kernels are held to: their own, or what a tree looks like."""
        if self.version is not None:
            return self.version
        if not self.second_generation:
            return VLLM_FIRST
        return VLLM if self.wide_kkt else PREPARES_BEFORE[1]

    def own_capabilities(self) -> Capabilities:
        """The capabilities of the version that was found."""
        return self.capabilities

    @staticmethod
    def contract_for(version: str | None) -> Contract:
        raise CannotRun("no kernel")


def _give_scratch_memory() -> None:
    """Triton asks the program for memory when a kernel makes TMA descriptors (0.19.1's solve on SM90)."""
    import triton

    if torch.cuda.is_available() and hasattr(triton, "set_allocator"):
        triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8)
        )
