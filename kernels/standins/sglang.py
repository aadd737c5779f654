"""What SGLang's GDN kernels need from the rest of SGLang: one version number, and which GPU this is.

Read in sglang 0.5.23: the kernel folder is `sglang/kernels/ops/attention/fla`; its `utils.py` asks
`sglang.srt.utils.common` for torch's release, its `fused_recurrent.py` names CUDA kernels only inside
functions for other models, and its `chunk.py` takes files of the Intel backend on Intel only.
`linear/fused_sigmoid_gating_recurrent.py` asks `sglang.srt.utils` for the platform, by which it chooses a
block size, and `sglang.kernels.jit.utils` whether launches may overlap (programmatic dependent launch).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from .modules import bare_packages, locate, stand_in

LAYOUTS = ("sglang/kernels/ops/attention/fla/chunk.py",)


def torch_release() -> tuple[int, ...]:
    """torch's release numbers, (2, 13, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", torch.__version__.partition("+")[0])[:3])


def device_capability() -> int:
    """90 for SM90; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def install(name: str) -> tuple[Path, str]:
    """Put bare packages and stand-ins into sys.modules; (source root, dotted name of the kernel package).

    name: `sglang` with its version or path, for errors. Raises CannotRun where no known layout lies on
    sys.path.
    """
    root, found = locate(name, LAYOUTS)
    package = found.removesuffix("/chunk.py").replace("/", ".")
    bare_packages(root, package)
    bare_packages(root, "sglang.kernels.ops.attention.linear")
    bare_packages(root, "sglang.srt.utils")
    bare_packages(root, "sglang.kernels.jit")
    hip, capability = torch.version.hip is not None, device_capability()
    platform = sys.modules["sglang.srt.utils"]
    vars(platform).update(
        is_hip=lambda: hip,
        is_cuda=lambda: capability > 0 and not hip,
        get_device_sm=lambda: capability,
        is_gfx95_supported=lambda: False,
        is_sm90_supported=lambda: capability // 10 == 9 and not hip,
    )
    stand_in("sglang.kernels.jit.utils", is_arch_support_pdl=lambda: capability >= 90 and not hip)
    stand_in("sglang.srt.utils.common", torch_release=torch_release())
    return root, package
