"""Seeded families of convolutions' inputs: lengths around the window, every width and dtype, plain cases."""

from __future__ import annotations

import torch
from gdncheck.compare.ops.op import OpInputs
from gdncheck.reference.op_functions import Conv

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def conv_inputs(seed, *, op="conv", exact=False, bias=None, state=None, lengths=None, dtype=None, width=None):
    """One case: what is not given is drawn. Channel 3 is a thousand times smaller than the others."""
    dice = torch.Generator().manual_seed(seed)

    def pick(values):
        return values[int(torch.randint(len(values), (1,), generator=dice))]

    width = width or pick((2, 3, 4))
    dtype = dtype or pick(DTYPES)
    channels = pick((9, 16, 24))
    if lengths is None:
        n = pick((1, 2, 4))
        lengths = [1] * n if op == "conv-update" else [pick((1, 2, 3, 5, 12)) for _ in range(n)]
    bias = pick((True, False)) if bias is None else bias
    state = pick((True, False)) if state is None else state
    n_tokens, n = sum(lengths), len(lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)

    def numbers(*shape, low=-4, high=5):
        if exact:
            return torch.randint(low, high, shape, generator=dice).to(dtype)
        return torch.randn(*shape, generator=dice).to(dtype)

    scale = torch.ones(channels)
    if not exact:
        scale[3] = 2.0**-10
    tensors = {
        "conv_input": numbers(n_tokens, channels) * scale.to(dtype),
        "conv_weight": numbers(channels, width, low=-2, high=3) * (1 if exact else 0.5),
        "cu_seqlens": cu_seqlens,
    }
    if bias:
        # Far from where SiLU bends, so that integers stay integers.
        tensors["conv_bias"] = (numbers(channels) + 80) if exact else numbers(channels) * scale.to(dtype)
    if state:
        tensors["conv_state"] = numbers(n, channels, width - 1) * scale.to(dtype)[:, None]
    return OpInputs(tensors, Conv(), cu_seqlens)
