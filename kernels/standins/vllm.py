"""What vLLM's copy of the GDN kernels needs from the rest of vLLM, in a few lines each.

Read in vllm 0.19.1, 0.23.0, 0.29.0 and 0.33.0: the kernel files name `vllm.triton_utils` (all),
`vllm.platforms.current_platform` (device choice), `vllm.utils.math_utils` and `vllm.utils.platform_utils`
(norms), `vllm.utils.gpu_sync_debug` and `vllm.utils.torch_utils.async_tensor_h2d` (chunk indices, from
0.29), `vllm.logger` (newer trees), `vllm.v1.attention.backends.utils` (the conv's padding index) and
`vllm.model_executor.warmup` (0.33's layer norm, a class to compile before the first call).
The numbers that these compute are exact, so the kernels' results do not depend on them.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .modules import bare_packages, locate, stand_in

# Newest first: a tree that still has both would run the newer one.
LAYOUTS = (
    "vllm/third_party/flash_linear_attention/ops/chunk.py",
    "vllm/model_executor/layers/fla/ops/chunk.py",
)
LOG2_E = 1.4426950216  # vllm.utils.math_utils.RCP_LN2: the float32 nearest to 1 / ln 2


class Platform:
    """The questions that kernel files ask `current_platform`, answered from torch."""

    device_type = "cuda" if torch.cuda.is_available() else "cpu"

    def is_cuda(self) -> bool:
        return torch.cuda.is_available() and torch.version.hip is None

    def is_rocm(self) -> bool:
        return torch.version.hip is not None

    def is_cuda_alike(self) -> bool:
        return torch.cuda.is_available()

    def is_cpu(self) -> bool:
        # Said of vLLM's build, not of this machine: a build for CPUs replaces its Triton kernels.
        return False

    def is_arch_support_pdl(self) -> bool:
        # vllm/platforms/cuda.py: programmatic dependent launch from SM90 on.
        return self._capability(0) >= 90

    def is_xpu(self) -> bool:
        return False

    def is_tpu(self) -> bool:
        return False

    def get_device_name(self, device_id: int = 0) -> str:
        return torch.cuda.get_device_name(device_id) if torch.cuda.is_available() else "cpu"

    def is_device_capability(self, capability: int | tuple[int, int], device_id: int = 0) -> bool:
        return self._capability(device_id) == _as_number(capability)

    def has_device_capability(self, capability: int | tuple[int, int], device_id: int = 0) -> bool:
        return self._capability(device_id) >= _as_number(capability)

    def is_device_capability_family(self, capability: int, device_id: int | None = 0) -> bool:
        return self._capability(device_id or 0) // 10 == capability // 10

    def _capability(self, device_id: int) -> int:
        return _as_number(torch.cuda.get_device_capability(device_id)) if torch.cuda.is_available() else 0


def _as_number(capability: int | tuple[int, int]) -> int:
    return capability if isinstance(capability, int) else capability[0] * 10 + capability[1]


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least n; 1 for n < 1."""
    return 1 if n < 1 else 1 << (n - 1).bit_length()


def num_compute_units(device_id: int = 0) -> int:
    """Multiprocessors of a GPU; 1 where there is none."""
    return (
        torch.cuda.get_device_properties(device_id).multi_processor_count if torch.cuda.is_available() else 1
    )


def async_tensor_h2d(data: Any, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor or list moved to a device; blocking, which changes no value."""
    return torch.as_tensor(data).to(device=device, dtype=dtype)


class JitKernel:
    """Base of a kernel that can compile itself beforehand (0.33's layer norm); only the call counts."""

    def __class_getitem__(cls, key: Any) -> type:
        return cls


def not_here(*_: Any, **__: Any) -> Any:
    """Stands for what only warming up calls."""
    raise NotImplementedError("vLLM's warm-up is not run here; the kernel is called as it is")


def install(name: str) -> tuple[Path, str]:
    """Put bare packages and stand-ins into sys.modules; (source root, dotted name of the ops package).

    name: `vllm` with its version or path, for errors. Triton must be importable; nothing of vLLM may
    have been imported. Raises CannotRun where no known layout lies on sys.path.
    """
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    root, found = locate(name, LAYOUTS)
    package = found.removesuffix("/chunk.py").replace("/", ".")
    bare_packages(root, package)
    bare_packages(root, "vllm.model_executor.layers.mamba.ops")
    bare_packages(root, "vllm.v1.attention.backends")
    bare_packages(root, "vllm.utils")
    stand_in(
        "vllm.triton_utils", triton=triton, tl=tl, tldevice=libdevice, HAS_TRITON=True, LOG2E=LOG2_E,
    )  # fmt: skip
    stand_in("vllm.platforms", current_platform=Platform())
    stand_in("vllm.logger", init_logger=logging.getLogger, logger=logging.getLogger("vllm"))
    stand_in("vllm.utils.math_utils", cdiv=cdiv, next_power_of_2=next_power_of_2, RCP_LN2=LOG2_E)
    stand_in("vllm.utils.platform_utils", num_compute_units=num_compute_units)
    stand_in("vllm.utils.gpu_sync_debug", gpu_sync_allowed=contextlib.nullcontext)
    stand_in("vllm.utils.torch_utils", async_tensor_h2d=async_tensor_h2d)
    warmup = "vllm.model_executor.warmup"
    stand_in(warmup, __path__=[])
    stand_in(f"{warmup}.jit_warmup", VllmJitKernel=JitKernel)
    names = ("TritonPointerInputVariant", "TritonWarmupTensor", "triton_scalar_specialization_rep")
    stand_in(f"{warmup}.jit_warmup_triton_helper", **dict.fromkeys(names, not_here))
    # vllm/v1/attention/backends/utils.py: -1 marks a padded row, 0 is the block that nobody owns.
    stand_in("vllm.v1.attention.backends.utils", PAD_SLOT_ID=-1, NULL_BLOCK_ID=0)
    return root, package
