"""What SGLang's GDN kernels need from the rest of SGLang: one version number.

Read in sglang 0.5.23: the kernel folder is `sglang/kernels/ops/attention/fla`; its `utils.py` asks
`sglang.srt.utils.common` for torch's release, its `fused_recurrent.py` names CUDA kernels only inside
functions for other models, and its `chunk.py` takes files of the Intel backend on Intel only.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from .modules import bare_packages, locate, stand_in

LAYOUTS = ("sglang/kernels/ops/attention/fla/chunk.py",)


def torch_release() -> tuple[int, ...]:
    """torch's release numbers, (2, 13, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", torch.__version__.partition("+")[0])[:3])


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
    stand_in("sglang.srt.utils.common", torch_release=torch_release())
    return root, package
