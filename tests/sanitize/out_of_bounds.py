"""A Triton kernel that reads one block behind the end of its buffer, and masks it away: no number changes."""

import torch
import triton
import triton.language as tl
from gdncheck.kernels import planted


@triton.jit
def twist_kernel(source, target, n, BLOCK: tl.constexpr, PAST: tl.constexpr):
    """target = source; with PAST it also reads what follows the buffer."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + at, mask=at < n, other=0.0)
    if PAST:
        behind = tl.load(source + n + tl.arange(0, BLOCK))
        values = tl.where(n > 0, values, behind)  # not to be known when it is compiled
    tl.store(target + at, values, mask=at < n)


def _rule(past, q, k, v, g, beta, **keywords):
    output, state = planted.rule(q, k, v, g, beta, **keywords)
    copied, n = torch.empty_like(state), state.numel()
    twist_kernel[(triton.cdiv(n, 256),)](state.contiguous(), copied, n, BLOCK=256, PAST=past)
    return output, copied


def sound(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
    given = {"scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    return _rule(False, q, k, v, g, beta, output_final_state=output_final_state, **given)


def past_the_end(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
    given = {"scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    return _rule(True, q, k, v, g, beta, output_final_state=output_final_state, **given)


gdncheck_capabilities = {"profile": planted.PROFILE, "stages": ("twist",)}
