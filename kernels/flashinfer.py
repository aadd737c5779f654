"""FlashInfer's prefill for SM90, `flashinfer.chunk@0.6.6`: vLLM's default there.

The idea: the kernel is one function of one shared library, compiled at first use from the wheel's own
sources (`flashinfer_build`) and loaded by apache-tvm-ffi; no other part of flashinfer is imported. It is
called as flashinfer's own wrapper and vLLM's do: linear decay, float32 beta and state, q and k
normalised before, int64 offsets, state as [V, K].

Leaves to others: later versions, which replace this kernel (CuTe DSL) and are kernels of their own.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..capture.errors import CannotRun, Refused
from . import layouts
from .cache import cache_root
from .contract import Capabilities, Contract
from .contracts_engines import flashinfer_chunk
from .engine_call import check_rule_call, prepared_qk, scale_of
from .interface import KernelCall, KernelInfo
from .slots import SlotView

HEAD_SIZE = 128
SM90 = (9, 0)
WORKSPACE_BYTES = 128  # one tensor map per multiprocessor
LIBRARY_VARIABLE = "GDNCHECK_FLASHINFER_LIBRARY"
SOURCES = ("flashinfer/data/csrc/gdn_prefill_launcher.cu",)


def library_path(root: Path, version: str | None) -> Path:
    """Where the compiled library of a version lies: beside the cache that its sources came from."""
    in_cache = root.parent.name == "flashinfer" and root.parent.parent.name == "kernels"
    base = root.parents[2] if in_cache else cache_root()
    return base / "built" / f"flashinfer-{version or 'installed'}" / "gdn_prefill_sm90.so"


def find_library(version: str | None) -> Path:
    """The compiled library: what $GDNCHECK_FLASHINFER_LIBRARY names, or the cache's, built if missing.

    Raises CannotRun where it cannot be had.
    """
    given = os.environ.get(LIBRARY_VARIABLE)
    if given:
        if not Path(given).is_file():
            raise CannotRun(f"{LIBRARY_VARIABLE} names {given}, which is no file")
        return Path(given)
    from .flashinfer_build import build
    from .standins.modules import locate

    root, _ = locate("flashinfer" if version is None else f"flashinfer@{version}", SOURCES)
    library = library_path(root, version)
    if not library.is_file():
        print(f"flashinfer: compiling {library.name}, about 10 minutes of one core", file=sys.stderr)
        build(
            root / "flashinfer" / "data",
            library,
            jobs=min(4, os.cpu_count() or 1),
            report=lambda line: print(line, file=sys.stderr),
        )
    return library


class Chunk:
    """`gdn_prefill`: bf16, with gate and beta, with or without an initial state and grouped heads."""

    package = "flashinfer-python"
    op = "chunk"
    capabilities = Capabilities(
        default_chunk_size=64,
        state_layout="VK",
        gate_space="linear",
        l2norm="before",
        input_dtypes=("bfloat16",),
        state_dtypes=("float32", "bfloat16", "float16"),
        profile="flashinfer-0.6",
        devices=("cuda",),
    )

    def __init__(self, version: str | None = None) -> None:
        """Load the library, compiling it first where that was never done. Raises CannotRun."""
        self.version = version
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() != SM90:
            found = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
            raise CannotRun(f"flashinfer.chunk 0.6.6 runs on SM90 (H100, H200, H20) only; here is {found}")
        try:
            tvm_ffi = import_module("tvm_ffi")
        except ImportError as error:
            raise CannotRun(
                "flashinfer.chunk needs apache-tvm-ffi to load its library; run: "
                "pip install 'apache-tvm-ffi>=0.1.6,<0.2'"
            ) from error
        self.library = find_library(version)
        self.module = tvm_ffi.load_module(str(self.library))
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        # One per process, as upstream keeps it: two streams would share it.
        self.workspace = torch.zeros(processors * WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self.evidence: dict[str, Any] = {}

    @staticmethod
    def contract_for(version: str | None) -> Contract:
        return flashinfer_chunk(version)

    def describe(self) -> KernelInfo:
        name = "flashinfer.chunk" + (f"@{self.version}" if self.version else "")
        return KernelInfo(
            name=name,
            version=self.version,
            capabilities=self.capabilities,
            contract=msgspec.structs.replace(self.contract_for(self.version), kernel=name),
            environment={"backend": "cutlass", "library": self.library.name},
        )

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """One prefill call. Raises Refused for what the kernel does not take."""
        tensors = call.tensors
        check_rule_call("flashinfer.chunk", call, self.capabilities)
        check_all_filled(call)
        key, value = tensors["k"].shape[-1], tensors["v"].shape[-1]
        if (key, value) != (HEAD_SIZE, HEAD_SIZE):
            raise Refused(f"flashinfer.chunk takes K = V = {HEAD_SIZE}, not {key} and {value}")
        q, k, in_kernel = prepared_qk(call, default="before")
        if in_kernel:
            raise Refused("flashinfer.chunk ignores its l2norm flag; ask for l2norm before the kernel")
        arguments = kernel_arguments(tensors)
        slots = SlotView(tensors, layout="VK", state_dtype=call.options.state_dtype)
        has_state = "pool" in tensors or "initial_state" in tensors
        output = torch.empty_like(tensors["v"].contiguous())
        final_state = torch.empty(slots.gathered().shape, dtype=torch.float32, device=output.device)
        self.module.gdn_prefill(
            output,
            final_state,
            q.contiguous(),
            k.contiguous(),
            arguments["v"],
            arguments["cu_seqlens"],
            slots.gathered().float() if has_state else None,
            arguments["alpha"],
            arguments["beta"],
            scale_of(call),
            self.workspace,
        )
        self.evidence = {
            "backend": "cutlass",
            "instance": f"gva={tensors['v'].shape[1] > q.shape[1]}, init_state={has_state}",
        }
        slots.scatter(final_state)
        return {"output": output, **slots.outputs()}


def check_all_filled(call: KernelCall) -> None:
    """Raise Refused for an empty sequence, unless the call says `allow_empty`: on an H200 the kernel never
    came back from lengths 0, 65, 70."""
    offsets = call.tensors["cu_seqlens"]
    lengths = (offsets[1:] - offsets[:-1]).tolist()
    if 0 in lengths and not call.options.extra.get("allow_empty"):
        raise Refused(f"sequence {lengths.index(0)} is empty: flashinfer.chunk was seen to hang on one")


def kernel_arguments(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The canonical tensors that the kernel takes in another form: linear float32 decay, float32 beta."""
    return {
        "v": tensors["v"].contiguous(),
        "alpha": layouts.log_to_linear(tensors["g"].float()).contiguous(),
        "beta": tensors["beta"].float().contiguous(),
        "cu_seqlens": layouts.own_offsets(tensors["cu_seqlens"], torch.int64),
    }


KERNELS = {"chunk": Chunk}
