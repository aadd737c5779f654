"""A kernel that reads shared memory which it never wrote; sound unless that is all NaN. GPU only."""

import torch
from gdncheck.kernels import planted
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WORDS, TOKEN, HEAD = 1024, 3, 1


@gluon.jit
def leftover_kernel(out, N: gl.constexpr):
    """Store what an allocation holds that nobody filled."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile = gl.allocate_shared_memory(gl.int32, [N], shared)
    gl.store(out + gl.arange(0, N, layout), tile.load(layout))


def rule(q, k, v, g, beta, **keywords):
    """The sound kernel, one row of it spoiled by leftovers."""
    output, state = planted.rule(q, k, v, g, beta, **keywords)
    left = torch.zeros(WORDS, dtype=torch.int32, device=v.device)
    leftover_kernel[(1,)](left, WORDS, num_warps=4)
    spoiled = left.view(torch.float32).isnan().all()
    output[TOKEN, HEAD] = torch.where(spoiled, torch.nan, output[TOKEN, HEAD].float()).to(output.dtype)
    return output, state


rule.gdncheck_capabilities = {"profile": planted.PROFILE}
