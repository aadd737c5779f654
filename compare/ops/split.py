"""split: the convolution's channels, in the order q|k|v, as heads side by side. A copy, so bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.ops.emulation import split as true_split
from ...reference.emulation_ops import OpRounding
from .op import Guess, Op, OpInputs, Tensors


def truth(inputs: OpInputs) -> Tensors:
    return true_split(inputs.tensors["conv_output"].double(), inputs.heads)


def emulate(inputs: OpInputs, at: OpRounding) -> Tensors:
    return true_split(inputs.tensors["conv_output"].float(), inputs.heads)


def _permuted(order: tuple[int, int, int]) -> Any:
    """The channels' groups q, k, v taken in another order."""

    def change(inputs: OpInputs) -> OpInputs:
        assert inputs.heads is not None
        n_key, key_dim, n_value, value_dim = inputs.heads
        sizes = [n_key * key_dim, n_key * key_dim, n_value * value_dim]
        parts = torch.split(inputs.tensors["conv_output"], sizes, dim=-1)
        return inputs.changed(conv_output=torch.cat([parts[i] for i in order], dim=-1))

    return change


OP = Op(
    name="split",
    truth=truth,
    emulate=emulate,
    reads="conv_output",
    function=None,
    copies=("q", "k", "v"),
    guesses=(
        Guess("q and k are swapped", _permuted((1, 0, 2))),
        Guess("the channels are read in the order v|q|k", _permuted((2, 0, 1))),
        Guess("the channels are read in the order k|v|q", _permuted((1, 2, 0))),
    ),
)
