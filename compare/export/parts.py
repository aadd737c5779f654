"""The script's part that knows the kernel, and what a kernel that cannot run here says of itself."""

from __future__ import annotations

from typing import Any

from ...capture.errors import BadInput, CannotRun
from ...kernels.interface import KernelInfo
from ...kernels.registry import adapter_class, parse_name
from ...kernels.standalone import Standalone, standalone
from .materials import Call


def declared(kernel: str, error: CannotRun) -> KernelInfo:
    """What a kernel that is not run declares as data. Raises the error where that is not known either."""
    name = parse_name(kernel)
    adapter: Any = None if name.family is None else adapter_class(name)
    if adapter is None:
        raise error
    return KernelInfo(
        name=kernel, version=name.version, capabilities=adapter.capabilities,
        contract=adapter.contract_for(name.version),
    )  # fmt: skip


def part_for(kernel: str, info: KernelInfo, call: Call) -> Standalone:
    """The part. Raises BadInput where there is none."""
    name = parse_name(kernel)
    part = standalone(
        name.family or "", name.op or "", version=info.version, capabilities=info.capabilities,
        chunk_size=call.setup.options.get("chunk_size"), module=name.module or "",
        attribute=name.attribute or "",
    )  # fmt: skip
    if part is None:
        raise BadInput(
            f"{kernel}: no stand-alone call is known for it under these deviations; there is one for fla.*, "
            "vllm.chunk, sglang.chunk, flashinfer.chunk, transformers.* and module:function"
        )
    return part
