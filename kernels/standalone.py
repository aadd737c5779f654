"""How each kernel is called without gdncheck: the text of two functions for a stand-alone script.

The idea: a script that is attached to an upstream report may use the kernel's own package and nothing of
ours, so what the adapter knows and the script cannot do without, the exact call (layout, dtypes, keywords),
is written out in `scripts/FAMILY.txt`. Every text defines

    load(folder)                  import the kernel; folder: where its files lie, None for the installed ones
    call(function, t, in_kernel)  -> (output [T, HV, V], final state [N, HV, K, V])

with t: q, k [T, HK, K], v, g (natural log), beta, cu_seqlens, scale, and initial_state [N, HV, K, V] and
has_initial_state, each of which may be None. in_kernel: q and k are raw and the kernel is to normalise them.
Words between at signs are filled in here. Sources: the adapters of this folder.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import msgspec

from .contract import Capabilities

CHUNK_FUNCTION, RECURRENT_FUNCTION = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"
BEFORE_0_20 = '.to(torch.bfloat16) if t["q"].dtype == torch.bfloat16 else t["beta"]'


class Standalone(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a script that knows one kernel."""

    package: str
    """What has to be installed, for the script's docstring."""
    text: str
    needs_gpu: bool
    by_default: str = "in_kernel"
    """Who normalises raw q and k in production: `in_kernel` or `before`."""


def standalone(
    family: str,
    op: str,
    *,
    version: str | None,
    capabilities: Capabilities,
    chunk_size: int | None = None,
    module: str = "",
    attribute: str = "",
) -> Standalone | None:
    """The text for a kernel; None where none is known. family: "" for a kernel by import path."""
    release = tuple(int(part) for part in (version or "").split(".")[:2] if part.isdecimal())
    if not family:
        return _by_import_path(module, attribute, capabilities, chunk_size)
    if family == "fla" and op in ("chunk", "recurrent"):
        return _fla(op, version, release, chunk_size)
    if chunk_size not in (None, capabilities.default_chunk_size):
        return None
    if family == "vllm" and op == "chunk":
        newer = release >= (0, 20)
        text = _filled(
            "vllm", module="chunk", function=CHUNK_FUNCTION, beta=".float()" if newer else BEFORE_0_20
        )
        by_default = "before" if newer else "in_kernel"
        return Standalone(package=_pinned("vllm", version), text=text, needs_gpu=True, by_default=by_default)
    if family == "sglang" and op == "chunk":
        return Standalone(package=_pinned("sglang", version), text=_filled("sglang"), needs_gpu=True)
    if family == "flashinfer" and op == "chunk":
        package, text = _pinned("flashinfer-python", version), _filled("flashinfer")
        return Standalone(package=package, text=text, needs_gpu=True, by_default="before")
    if family == "transformers" and op in ("chunk", "recurrent"):
        text = _filled("transformers", function=f"{op}_gated_delta_rule")
        return Standalone(package=_pinned("transformers", version), text=text, needs_gpu=False)
    return None


def _by_import_path(
    module: str, attribute: str, capabilities: Capabilities, chunk_size: int | None
) -> Standalone:
    text = _filled(
        "import_path", module=repr(module), attribute=repr(attribute), gva=capabilities.gva,
        chunk_size=chunk_size, state_dtypes=tuple(capabilities.state_dtypes),
        linear=capabilities.gate_space == "linear", varlen=capabilities.varlen,
        transposed=capabilities.state_layout == "VK",
    )  # fmt: skip
    by_default = "before" if capabilities.l2norm == "before" else "in_kernel"
    return Standalone(package=module, text=text, needs_gpu=False, by_default=by_default)


def _fla(op: str, version: str | None, release: tuple[int, ...], chunk_size: int | None) -> Standalone | None:
    """0.4's chunk path wants equal head counts and runs 64 whatever chunk size it is told."""
    first = release < (0, 5)
    if first and chunk_size not in (None, 64):
        return None
    text = _filled(
        "fla",
        function=CHUNK_FUNCTION if op == "chunk" else RECURRENT_FUNCTION,
        expand=op == "chunk" and first,
        chunk_size="" if first or op == "recurrent" or chunk_size is None else f" chunk_size={chunk_size},",
    )
    return Standalone(package=_pinned("fla-core", version), text=text, needs_gpu=True)


def _filled(name: str, **words: Any) -> str:
    """A text with its words in place. Raises KeyError for a word that is left over."""
    text = files("gdncheck.kernels").joinpath("scripts", f"{name}.txt").read_text(encoding="utf-8")
    return re.sub(r"@(\w+)@", lambda match: str(words[match[1]]), text)


def _pinned(package: str, version: str | None) -> str:
    return f"{package}=={version}" if version else package
