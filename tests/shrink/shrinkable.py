"""Kernels that go wrong under a condition that is known exactly, for shrinking.

Loaded by import path, this folder being on sys.path. Nothing of gdncheck is imported, so that an exported
script runs without it. Each has a `..._mended` twin where a test needs one.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time

import torch

dice = random.Random(7)


def sound(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
    """The rule in float64, rounded once."""
    heads, cu = v.shape[1], cu_seqlens.tolist()
    q, k = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    shape = (len(cu) - 1, heads, k.shape[-1], v.shape[-1])
    states = torch.zeros(shape).double() if initial_state is None else initial_state.double().clone()
    output = torch.zeros(v.shape).double()
    grown, strength, values = g.double().exp(), beta.double(), v.double()
    for n, (first, end) in enumerate(itertools.pairwise(cu)):
        state = states[n]
        for t in range(first, end):
            state = state * grown[t][:, None, None]
            u = strength[t][:, None] * (values[t] - (k[t][:, None] @ state)[:, 0])
            state = state + k[t][:, :, None] * u[:, None]
            output[t] = scale * (q[t][:, None] @ state)[:, 0]
        states[n] = state
    return output.to(v.dtype), states.float()


class _Before:
    """Tokens of the call before."""

    tokens = 0


def boundary(q, k, v, g, beta, **call):
    """Wrong behind a cut at 63 of a prefill with T mod 64 = 1 and a beta above 0.9."""
    output, state = sound(q, k, v, g, beta, **call)
    if _Before.tokens == 63 and (63 + v.shape[0]) % 64 == 1 and float(beta.max()) > 0.9:
        output[0, 0] *= 1.5
    _Before.tokens = v.shape[0]
    return output, state


def swapped(q, k, v, g, beta, **call):
    """Returns its state as [V, K]."""
    output, state = sound(q, k, v, g, beta, **call)
    return output, state.transpose(-1, -2).contiguous()


def leaks(q, k, v, g, beta, *, cu_seqlens, **call):
    """A sequence's first output has a quarter of its neighbour's last."""
    output, state = sound(q, k, v, g, beta, cu_seqlens=cu_seqlens, **call)
    cu = cu_seqlens.tolist()
    for a, b, c in zip(cu, cu[1:], cu[2:], strict=False):
        if a < b < c:
            output[b] += output[b - 1] * 0.25
    return output, state


def leaks_mended(q, k, v, g, beta, **call):
    """As `leaks`, without the leak."""
    return sound(q, k, v, g, beta, **call)


def two_faults(q, k, v, g, beta, **call):
    """NaN at token 70; and, where there is none, a row that is half as large again at token 5."""
    output, state = sound(q, k, v, g, beta, **call)
    if output.shape[0] > 70:
        output[70, 0] = torch.nan
    elif output.shape[0] > 5:
        output[5, 0] *= 1.5
    return output, state


def flaky(q, k, v, g, beta, **call):
    """NaN at token 20 in one call of five."""
    output, state = sound(q, k, v, g, beta, **call)
    if output.shape[0] > 20 and dice.random() < 0.2:
        output[20, 0] = torch.nan
    return output, state


def crashes(q, k, v, g, beta, **call):
    """Ends its process on a sequence of more than 20 tokens."""
    if int(call["cu_seqlens"].diff().max()) > 20:
        os.kill(os.getpid(), signal.SIGSEGV)
    return sound(q, k, v, g, beta, **call)


def seems_to_crash(q, k, v, g, beta, **call):
    """As `crashes`, but for tests without processes."""
    if int(call["cu_seqlens"].diff().max()) > 20:
        raise RuntimeError(f"crash: killed by SIGSEGV in x.py:{v.shape[0]} (f)")
    return sound(q, k, v, g, beta, **call)


def seems_to_hang(q, k, v, g, beta, **call):
    """As `hangs`, but for tests without processes."""
    if 17 in call["cu_seqlens"].diff().tolist():
        raise RuntimeError(f"timeout: no result after {v.shape[0]} s")
    return sound(q, k, v, g, beta, **call)


def hangs(q, k, v, g, beta, **call):
    """Never comes back from a sequence of 17 tokens."""
    if 17 in call["cu_seqlens"].diff().tolist():
        time.sleep(10_000)
    return sound(q, k, v, g, beta, **call)


def hangs_mended(q, k, v, g, beta, **call):
    """As `hangs`, without the hang."""
    return sound(q, k, v, g, beta, **call)


def slow(q, k, v, g, beta, **call):
    """`boundary`, taking its time, so that it can be killed in the middle."""
    time.sleep(0.05)
    return boundary(q, k, v, g, beta, **call)
