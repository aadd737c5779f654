"""Planted faults: a sound kernel that goes wrong in one configuration only, each at a known place.

Each is a kernel by import path, `planted:NAME`, this folder being on sys.path. Sound is the float64 truth,
rounded once; a fault multiplies one row of the output, or makes it or one head's state NaN, so that what,
where and when are known exactly.
"""

from __future__ import annotations

import itertools

import torch
from gdncheck.reference.truth import truth

HEAD, TOKEN, LANE = 1, 5, 3
BASE = {
    "chunk_sizes": (16, 32, 64),
    "state_dtypes": ("float32", "bfloat16", "float16"),
    "profile": "generic",
}


def sound(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, chunk_size=64):
    """The rule in float64, rounded once."""
    output, state = truth(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, l2norm=False
    )
    kept = torch.float32 if initial_state is None else initial_state.dtype
    return output.to(v.dtype), state.to(kept)


sound.gdncheck_capabilities = BASE


def spoil(output, row, head=HEAD, *, value=None):
    """One row of one head: NaN, or half as large again."""
    if row < output.shape[0]:
        output[row, head] = output[row, head] * 1.5 if value is None else value
    return output


def lengths_of(cu_seqlens):
    return (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()


def rule(**capabilities):
    """Give a faulty kernel the sound one's capabilities."""

    def mark(function):
        function.gdncheck_capabilities = {**BASE, **capabilities}
        return function

    return mark


@rule()
def chunk_64_and_64n_plus_1(q, k, v, g, beta, *, chunk_size=64, cu_seqlens, **call):
    """Wrong at the one token of the last chunk of a sequence of 64n+1, in chunks of 64."""
    output, state = sound(q, k, v, g, beta, cu_seqlens=cu_seqlens, **call)
    for i, n in enumerate(lengths_of(cu_seqlens)):
        if chunk_size == 64 and n > 1 and n % 64 == 1:
            spoil(output, int(cu_seqlens[i]) + n - 1)
    return output, state


@rule()
def state_bf16(q, k, v, g, beta, *, initial_state, **call):
    """NaN from a state that is handed in as bfloat16."""
    output, state = sound(q, k, v, g, beta, initial_state=initial_state, **call)
    if initial_state is not None and initial_state.dtype == torch.bfloat16:
        state[0, HEAD, LANE] = torch.nan
    return output, state


@rule()
def split_at_64n_plus_1(q, k, v, g, beta, *, initial_state, cu_seqlens, **call):
    """Wrong in the piece behind a cut at token 65, told by its length."""
    output, state = sound(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens, **call)
    if v.shape[0] == 130 - 65 and initial_state is not None and bool(initial_state.any()):
        spoil(output, TOKEN)
    return output, state


@rule()
def neighbour_poisoned(q, k, v, g, beta, *, cu_seqlens, **call):
    """NaN in a sequence whose neighbour holds NaN."""
    output, state = sound(q, k, v, g, beta, cu_seqlens=cu_seqlens, **call)
    bad = [bool(torch.isnan(v[a:b].float()).any()) for a, b in itertools.pairwise(cu_seqlens)]
    if any(bad) and not all(bad):
        spoil(output, int(cu_seqlens[bad.index(False)]) + TOKEN, value=torch.nan)
    return output, state


@rule()
def slot_stale(q, k, v, g, beta, *, initial_state, has_initial_state=None, **call):
    """Starts a fresh sequence from zeros, but for one row, which the slot's old state spoils."""
    stale = False
    if initial_state is not None and has_initial_state is not None:
        fresh = ~has_initial_state.bool().view(-1, 1, 1, 1)
        stale = bool((fresh & (initial_state != 0)).any())
        initial_state = torch.where(fresh, 0, initial_state)
    output, state = sound(q, k, v, g, beta, initial_state=initial_state, **call)
    return (spoil(output, TOKEN) if stale else output), state


@rule()
def memory_nan(q, k, v, g, beta, **call):
    """Adds a row of memory that nobody wrote."""
    output, state = sound(q, k, v, g, beta, **call)
    if bool(torch.isnan(torch.empty(v.shape[2])).all()):
        spoil(output, TOKEN, value=torch.nan)
    return output, state


@rule()
def beta_and_g_bf16(q, k, v, g, beta, **call):
    """Wrong when beta and g both come in bfloat16."""
    output, state = sound(q, k, v, g, beta, **call)
    if beta.dtype == g.dtype == torch.bfloat16:
        spoil(output, TOKEN)
    return output, state


class _Calls:
    """Identical calls in a row, in this process."""

    last = None
    count = 0
    ever = 0

    @classmethod
    def again(cls, *tensors):
        now = [None if t is None else float(t.double().nansum()) for t in tensors]
        cls.count = cls.count + 1 if now == cls.last else 1
        cls.last, cls.ever = now, cls.ever + 1
        return cls.count


@rule()
def third_repeat(q, k, v, g, beta, *, initial_state, cu_seqlens, **call):
    """Wrong at the third repeat of a call: the fourth of identical ones in a row."""
    output, state = sound(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens, **call)
    if _Calls.again(q, k, v, g, beta, cu_seqlens, initial_state) == 4:
        spoil(output, TOKEN)
    return output, state


@rule()
def first_call(q, k, v, g, beta, **call):
    """Wrong at a process's first call."""
    output, state = sound(q, k, v, g, beta, **call)
    _Calls.again(q)
    if _Calls.ever == 1:
        spoil(output, TOKEN)
    return output, state


@rule(pins=("toy_kernel:BK=32", "toy_kernel:BK=64", "toy_kernel:BK=128"))
def pin_of_64(q, k, v, g, beta, *, pins=None, **call):
    """Wrong under one autotune configuration."""
    output, state = sound(q, k, v, g, beta, **call)
    if (pins or {}).get("toy_kernel") == {"BK": 64}:
        spoil(output, TOKEN)
    return output, state


@rule(pins=("toy_kernel:BK=32", "toy_kernel:BK=64"))
def racing_pin(q, k, v, g, beta, *, pins=None, **call):
    """Under one configuration, one of the last bits moves with every second call."""
    output, state = sound(q, k, v, g, beta, **call)
    count = _Calls.again(q)
    if (pins or {}).get("toy_kernel") == {"BK": 64} and count % 2:
        output.view(torch.int16)[TOKEN, HEAD, LANE] ^= 1
    return output, state


@rule()
def four_heads(q, k, v, g, beta, **call):
    """Wrong with four value heads."""
    output, state = sound(q, k, v, g, beta, **call)
    if v.shape[1] == 4:
        spoil(output, TOKEN)
    return output, state


@rule()
def one_token_among_long(q, k, v, g, beta, *, cu_seqlens, **call):
    """Wrong in a sequence of one token that has a long one beside it."""
    output, state = sound(q, k, v, g, beta, cu_seqlens=cu_seqlens, **call)
    lengths = lengths_of(cu_seqlens)
    if 1 in lengths and max(lengths) > 1:
        spoil(output, int(cu_seqlens[lengths.index(1)]))
    return output, state


@rule()
def input_fp16(q, k, v, g, beta, **call):
    """Wrong on float16 inputs."""
    output, state = sound(q, k, v, g, beta, **call)
    return (spoil(output, TOKEN) if v.dtype == torch.float16 else output), state


@rule(l2norm="both")
def l2norm_before(q, k, v, g, beta, *, use_qk_l2norm_in_kernel=False, **call):
    """Normalises raw q and k rightly, and goes wrong where they come normalised."""
    if use_qk_l2norm_in_kernel:
        q, k = (x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    output, state = sound(q, k, v, g, beta, **call)
    return (output if use_qk_l2norm_in_kernel else spoil(output, TOKEN)), state


@rule()
def writes_outside(q, k, v, g, beta, **call):
    """Writes one entry behind the end of a buffer of its own."""
    output, state = sound(q, k, v, g, beta, **call)
    scratch = torch.empty(32)
    # Only into a band: behind a plain allocation there is nothing to write to that would not end the process.
    if scratch.untyped_storage().nbytes() > 33 * 4 + scratch.storage_offset() * 4:
        torch.as_strided(scratch, (33,), (1,), scratch.storage_offset())[32] = 1.0
    return output, state


class _Decoded:
    """The state after the last call, if that was of one token a sequence."""

    state = None


@rule()
def goes_on_from_a_guess(q, k, v, g, beta, *, initial_state, cu_seqlens, **call):
    """Wrong where a one-token call does not go on from what the one-token call before it left."""
    output, state = sound(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens, **call)
    one_token = set(lengths_of(cu_seqlens)) == {1}
    before = _Decoded.state if one_token and initial_state is not None else None
    if before is not None and not torch.equal(before, initial_state[0].float()):
        spoil(output, 0)
    _Decoded.state = state[0].float().clone() if one_token else None
    return output, state


@rule()
def third_of_any(q, k, v, g, beta, **call):
    """Wrong at the third call of a process, whatever it is: no configuration is to blame."""
    output, state = sound(q, k, v, g, beta, **call)
    _Calls.again(q)
    return (spoil(output, TOKEN) if _Calls.ever == 4 else output), state
