"""A tuned Triton kernel with one bad configuration, planted for `gdncheck selftest`.

The idea: the results of the sound kernel pass through a Triton copy whose tuner has three block sizes; with
one of them the copy's last block comes out half as large again. So finding it needs what a real fault of
this kind needs: the tuner seen, each configuration pinned and launched, and its result judged.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import planted

BAD_BLOCK = 128
BLOCKS = (64, BAD_BLOCK, 256)


@triton.autotune(configs=[triton.Config({"BLOCK": size}) for size in BLOCKS], key=["BAD"])  # type: ignore[untyped-decorator]
@triton.jit  # type: ignore[untyped-decorator]
def planted_copy_kernel(source, target, n, BAD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """target = source, but for the last block where BLOCK is BAD."""
    number = tl.program_id(0)
    at = number * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + at, mask=at < n, other=0.0)
    if BLOCK == BAD:
        values = tl.where(number == tl.num_programs(0) - 1, values * 1.5, values)
    tl.store(target + at, values, mask=at < n)


def copied(values: Tensor, bad_block: int) -> Tensor:
    """A float32 tensor through the kernel."""
    target = torch.empty_like(values)
    n = values.numel()
    planted_copy_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](values, target, n, BAD=bad_block)
    return target


def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
    """The sound kernel, its final state copied by the tuned kernel with the bad configuration."""
    output, final = planted.rule(q, k, v, g, beta, **keywords)
    return output, copied(final.contiguous(), BAD_BLOCK)


rule.gdncheck_capabilities = {"profile": planted.PROFILE}  # type: ignore[attr-defined]
