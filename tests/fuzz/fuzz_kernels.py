"""Test kernels of the fuzzer, each sound but for one fault that needs a condition, a process or luck.

Each is a kernel by import path, `fuzz_kernels:NAME`. Sound is the float64 truth, rounded once.
"""

from __future__ import annotations

import os
import random
import time

import torch
from gdncheck.reference.truth import truth

CAPABILITIES = {"state_dtypes": ("float32", "bfloat16"), "profile": "generic"}
SPLIT = 63


def sound(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
    """The rule in float64, rounded once."""
    output, state = truth(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, l2norm=False
    )
    kept = torch.float32 if initial_state is None else initial_state.dtype
    return output.to(v.dtype), state.to(kept)


class _Before:
    """The states of sequences of 63 tokens that the last call of this process left: a next one continues
    them."""

    states: tuple[torch.Tensor, ...] = ()


def edge(q, k, v, g, beta, *, cu_seqlens, initial_state, **call):
    """Wrong where a prefill of 64n + 1 tokens was cut at 63 and some beta is above 0.9: the last token is
    off."""
    output, state = sound(q, k, v, g, beta, cu_seqlens=cu_seqlens, initial_state=initial_state, **call)
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    for i, n in enumerate(lengths if initial_state is not None else ()):
        start = int(cu_seqlens[i])
        continued = any(torch.equal(initial_state[i], before) for before in _Before.states)
        if continued and n and (n + SPLIT) % 64 == 1 and bool((beta[start : start + n].float() > 0.9).any()):
            output[start + n - 1] *= 1.5
    _Before.states = tuple(state[i].clone() for i, n in enumerate(lengths) if n == SPLIT)
    return output, state


def crash(q, k, v, g, beta, *, cu_seqlens, **call):
    """Ends its process where a sequence has 17 tokens."""
    if 17 in (cu_seqlens[1:] - cu_seqlens[:-1]).tolist():
        os.abort()
    return sound(q, k, v, g, beta, cu_seqlens=cu_seqlens, **call)


def hang(q, k, v, g, beta, *, cu_seqlens, **call):
    """Never answers where a sequence has 47 tokens."""
    if 47 in (cu_seqlens[1:] - cu_seqlens[:-1]).tolist():
        time.sleep(3600)
    return sound(q, k, v, g, beta, cu_seqlens=cu_seqlens, **call)


def flake(q, k, v, g, beta, **call):
    """One call in ten has a row that is half as large again."""
    output, state = sound(q, k, v, g, beta, **call)
    if output.shape[0] and random.random() < 0.1:
        output[random.randrange(output.shape[0])] *= 1.5
    return output, state


def long(q, k, v, g, beta, **call):
    """Wrong at the 60th row of a call that has one."""
    output, state = sound(q, k, v, g, beta, **call)
    output[59:60] *= 1.5
    return output, state


for kernel in (sound, long, edge, crash, hang, flake):
    kernel.gdncheck_capabilities = CAPABILITIES
