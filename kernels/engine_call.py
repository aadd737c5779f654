"""What every adapter of a serving engine does with a call before its kernel sees it.

The idea: an engine's kernel takes one shape of the rule. Whatever else a call asks for is refused in one
line before it runs, so that a wrong result never comes from an option that was quietly ignored.

Leaves to others: conversions (`layouts`, `slots`), what else a kernel refuses (its adapter).
"""

from __future__ import annotations

import os
from typing import Literal

import msgspec
import torch
from torch import Tensor

from ..capture.errors import Refused
from . import autotune, layouts
from .contract import Capabilities
from .interface import KernelCall

# What an engine's token-by-token kernels take: vLLM's and SGLang's, for recurrent, decode and verify steps.
RECURRENT = Capabilities(
    default_chunk_size=None,
    state_layout="VK",
    l2norm="both",
    state_dtypes=("float32", "bfloat16", "float16"),
    slots=True,
    replays=True,
    profile="fla-recurrent",
    max_tokens_cpu=256,
)
# The same, with a row of slots per sequence: a draft and what was accepted of it.
WITH_COLUMNS = msgspec.structs.replace(RECURRENT, columns=True)


def prepare_triton() -> bool:
    """Make triton ready before an engine's kernels are imported; whether it is interpreted.

    Without a GPU its interpreter runs, mended; with one, tuned configurations are recorded and pinned.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()
    if interpreted:
        from . import interpreter

        interpreter.install()
    else:
        autotune.install()
    return interpreted


def check_rule_call(name: str, call: KernelCall, capabilities: Capabilities) -> None:
    """Raise Refused for a call of the rule that the kernel cannot take as asked."""
    tensors, options = call.tensors, call.options
    q, v = tensors["q"], tensors["v"]
    types = {layouts.dtype_name(tensors[x].dtype) for x in ("q", "k", "v")}
    if len(types) > 1 or not types <= set(capabilities.input_dtypes):
        known = " or ".join(capabilities.input_dtypes)
        raise Refused(f"{name}: q, k, v must share one of {known}, not {', '.join(sorted(types))}")
    if tensors["g"].dim() == 3 and not capabilities.channel_gate:
        raise Refused(f"{name} takes one decay per head [T, HV]; g is per key channel [T, HV, K]")
    if q.shape[1] == 0 or v.shape[1] % q.shape[1]:
        raise Refused(f"{name}: {v.shape[1]} value heads cannot share {q.shape[1]} key heads evenly")
    if v.shape[0] == 0:
        raise Refused(f"{name} is never called without a token")
    size = options.chunk_size
    if size is not None and size not in (capabilities.default_chunk_size, *capabilities.chunk_sizes):
        fixed = capabilities.default_chunk_size
        raise Refused(f"{name} works in chunks of {fixed}, not {size}" if fixed else f"{name} has no chunks")
    if options.state_dtype not in (None, *capabilities.state_dtypes):
        kept = " or ".join(capabilities.state_dtypes)
        raise Refused(f"{name} keeps its state in {kept}, not {options.state_dtype}")


def check_no_empty(name: str, call: KernelCall) -> None:
    """Raise Refused where an empty sequence has a successor, unless the call says `allow_empty`.

    The tables of chunks count first chunks to number the sequences; an empty one has none, so all that
    follow it are taken for their predecessors. Engines never schedule one.
    """
    if call.options.extra.get("allow_empty"):
        return
    offsets = call.tensors["cu_seqlens"]
    lengths = (offsets[1:] - offsets[:-1]).tolist()
    last = max((i for i, n in enumerate(lengths) if n), default=-1)
    if 0 in lengths[: max(last, 0)]:
        raise Refused(
            f"sequence {lengths.index(0)} is empty and not the last: {name} numbers the sequences of its "
            "chunks without the empty ones and would mix up all that follow"
        )


def prepared_qk(
    call: KernelCall, default: Literal["in_kernel", "before"], eps: float = layouts.L2NORM_EPS
) -> tuple[Tensor, Tensor, bool]:
    """(q, k, whether the kernel must l2-normalise them).

    default: where the engine does it; the call's option overrides. q and k that come normalised are
    passed on and the kernel's own l2norm stays off.
    """
    q, k = call.tensors["q"], call.tensors["k"]
    if call.options.qk == "normalised":
        return q, k, False
    if (call.options.l2norm or default) == "in_kernel":
        return q, k, True
    return layouts.l2norm_rounded(q, eps), layouts.l2norm_rounded(k, eps), False


def scale_of(call: KernelCall) -> float:
    """The factor on the output: the call's, or K**-0.5."""
    given = call.options.scale
    return float(call.tensors["q"].shape[-1]) ** -0.5 if given is None else given


def rounded_beta(beta: Tensor, like: Tensor) -> Tensor:
    """beta as a layer stores it that keeps it in the model's dtype (bfloat16 models only).

    A contract's clause `beta.dtype` says bfloat16, so a float16 call keeps what it was given.
    """
    return beta.to(torch.bfloat16) if like.dtype == torch.bfloat16 else beta
