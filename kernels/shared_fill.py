"""A Triton (Gluon) kernel that fills the whole shared memory of every multiprocessor with one word.

The idea: a block that takes all the shared memory that a block may have is alone on its multiprocessor, so as
many blocks as there are multiprocessors, started together, reach each of them; which ones they reached is
counted. Imported on a GPU only, by `shared_memory`; needs Triton 3.5 or later.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WARPS = 16


@gluon.jit  # type: ignore[untyped-decorator]
def fill_kernel(seen, bits, SIZES: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Write `bits` to SIZES words in a row of this block's memory; count a visit in seen[multiprocessor]."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    buffers = ()
    # All of them before the first store, or the compiler would let them share one place.
    for i in gl.static_range(len(SIZES)):
        more = (gl.allocate_shared_memory(gl.int32, [SIZES[i]], shared),)
        buffers = buffers + more  # type: ignore[assignment]
    for i in gl.static_range(len(SIZES)):
        buffers[i].store(gl.full([SIZES[i]], bits, gl.int32, layout))
    multiprocessor = gl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.atomic_add(seen + multiprocessor, 1)


def sizes_of(n_bytes: int) -> tuple[int, ...]:
    """Powers of two, in words, the largest first, that together take n_bytes."""
    words = n_bytes // 4
    return tuple(1 << bit for bit in reversed(range(words.bit_length())) if words >> bit & 1)


def fill(seen: Any, bits: int, n_bytes: int, blocks: int) -> None:
    """Launch it. seen: [multiprocessors] int32 on the GPU; n_bytes: shared memory of one block."""
    fill_kernel[(blocks,)](seen, bits, sizes_of(n_bytes), WARPS, num_warps=WARPS)
