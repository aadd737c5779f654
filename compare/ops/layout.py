"""Rows, heads and tiles of an operation's outputs, so that the rule's tables (`tiles`) serve here too.

The idea: every output is seen as [rows, heads, entries]: a row is a token or a sequence's state, a head one
of q, k or v; the convolution's channels are cut into the heads that they become.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from ..tiles import TileMap, map_states, map_tokens
from .op import Heads, OpInputs

CHUNK = 64
STATES = ("final_conv_state", "final_state")
CHANNELS = ("conv_output", "final_conv_state")


def as_rows(name: str, tensor: Tensor, heads: Heads | None) -> Tensor:
    """[R, H, entries] of an output in its canonical shape."""
    if name in CHANNELS:
        group = channel_group(tensor.shape[1], heads)
        return tensor.reshape(tensor.shape[0], tensor.shape[1] // group, -1)
    # A state keeps its [K, V]: how many directions its error has is counted there (`draws`).
    return tensor.unsqueeze(-1) if tensor.ndim == 2 else tensor


def channel_group(n_channels: int, heads: Heads | None) -> int:
    """Channels that are named as one head: K, or what K and V share; all where the case does not say."""
    if heads is None:
        return n_channels
    return math.gcd(heads[1], heads[3])


def tile_map(name: str, inputs: OpInputs) -> TileMap:
    """Tiles of an output, under its own name."""
    if name in STATES:
        tiles = map_states(len(inputs.cu_seqlens) - 1, inputs.cu_seqlens.device)
    else:
        tiles = map_tokens(inputs.cu_seqlens, CHUNK)
    return replace(tiles, tensor=name)


def channel_words(head: int, heads: Heads | None) -> str:
    """What a head of the convolution's channels is: `q head 1`."""
    if heads is None:
        return "all channels"
    n_key, key_dim, _, value_dim = heads
    group = math.gcd(key_dim, value_dim)
    channel = head * group
    for name, first, dim in (("q", 0, key_dim), ("k", n_key * key_dim, key_dim)):
        if channel < first + n_key * key_dim:
            return f"{name} head {(channel - first) // dim}"
    return f"v head {(channel - 2 * n_key * key_dim) // value_dim}"
