"""Numbered convolutions, and the public faults as convolutions: case i is a function of (seed, i).

The idea: what a convolution can get wrong is who its past belongs to, so every case has a pool: slots out of
order among strangers (NaN, huge, another tenant's state), some sequences fresh, some padded, lengths from one
token to several blocks. Rows 8, 10 and 11 of the list of public faults stand here by themselves, in the
channels of Qwen3.5-35B-A3B; `exact` cases are integers whose every bit is known. `h200/convs` runs them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from gdncheck.compare.ops.op import OpInputs
from gdncheck.reference.op_functions import Conv
from torch import Tensor

MODEL_CHANNELS = 8192  # conv channels of Qwen3.5-35B-A3B
CHANNELS = (64, 2048)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EDGES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129)
STRANGERS = (float("nan"), 1e30, 3.0)


class Draw:
    """Tensors of one case."""

    def __init__(self, seed: int, dtype: torch.dtype, device: str, exact: bool = False) -> None:
        self.dice = torch.Generator().manual_seed(seed)
        self.dtype, self.device, self.exact = dtype, device, exact

    def numbers(self, *shape: int, low: int = -4, high: int = 5, scale: float = 1.0) -> Tensor:
        """Normal numbers, or integers from low to below high."""
        if self.exact:
            drawn = torch.randint(low, high, shape, generator=self.dice).float()
        else:
            drawn = torch.randn(*shape, generator=self.dice) * scale
        return drawn.to(self.dtype).to(self.device)

    def strangers(self, n_rows: int, channels: int, columns: int) -> Tensor:
        """[n_rows, channels, columns]: NaN, a huge number, another tenant's state, in turn."""
        pool = torch.empty(n_rows, channels, columns, dtype=self.dtype, device=self.device)
        largest = float(torch.finfo(self.dtype).max) / 4
        for row in range(n_rows):
            pool[row] = STRANGERS[0] if row % 3 == 0 else min(STRANGERS[row % 3], largest)
        return pool


def convolution(
    draw: Draw,
    lengths: Sequence[int],
    *,
    channels: int,
    width: int,
    bias: bool,
    has_state: Sequence[bool],
    padded: Sequence[int] = (),
    separate: bool = False,
) -> OpInputs:
    """A call with a pool of strangers; sequence n starts from its slot where has_state[n], else afresh."""
    n = len(lengths)
    n_rows = (2 if separate else 1) * n + 3
    order = torch.randperm(n_rows - 1, generator=draw.dice)  # the last row is nobody's
    read, write = order[:n], order[n : 2 * n] if separate else order[:n]
    pool = draw.strangers(n_rows, channels, width - 1)
    keeps = torch.tensor(list(has_state))
    if bool(keeps.any()):
        rows = read[keeps].to(draw.device)
        pool[rows] = draw.numbers(int(keeps.sum()), channels, width - 1)
    slots = write.clone()
    slots[list(padded)] = -1
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(draw.device)
    tensors = {
        "conv_input": draw.numbers(sum(lengths), channels),
        "conv_weight": draw.numbers(channels, width, low=-2, high=3, scale=0.5),
        "cu_seqlens": cu_seqlens,
        "conv_pool": pool,
        "slot_indices": slots.to(draw.device),
        "has_initial_state": keeps.to(draw.device),
    }
    if separate:
        tensors["read_slot_indices"] = read.to(draw.device)
    if bias:
        shift = 80 if draw.exact else 0  # where SiLU is its argument
        tensors["conv_bias"] = draw.numbers(channels) + shift
    return OpInputs(tensors, Conv(), cu_seqlens)


def public(op: str, device: str, channels: int = MODEL_CHANNELS) -> Iterator[tuple[str, OpInputs]]:
    """Rows 8, 10 and 11, and separate slots with sequences shorter than the window."""
    draw = Draw(8, torch.bfloat16, device)
    rest = {"channels": channels, "width": 4, "bias": False}
    if op == "conv":
        mixed = [True, False, True, False, False, True]
        yield "row 8", convolution(draw, [3, 1, 200, 2, 40, 1], has_state=mixed, **rest)
        yield "row 10", convolution(draw, [1, 1, 1, 200], has_state=[True] * 4, **rest)
        yield "row 11", convolution(draw, [5, 3, 62], has_state=[False] * 3, **rest)
        yield "row 11 with states", convolution(draw, [5, 3, 62], has_state=[True] * 3, **rest)
        yield "padded", convolution(draw, [9, 4, 3, 70], has_state=[True] * 4, padded=[1, 2], **rest)
        whole = [3, 70, 4]
        yield "separate slots", convolution(draw, whole, has_state=[True] * 3, separate=True, **rest)
        short = [1, 70, 2]
        yield "separate slots, short", convolution(draw, short, has_state=[True] * 3, separate=True, **rest)
        return
    states = [i % 5 != 3 for i in range(64)]
    yield "row 8", convolution(draw, [1] * 64, has_state=states, **rest)
    yield "padded", convolution(draw, [1] * 8, has_state=[True] * 8, padded=[0, 5, 7], **rest)
    yield "separate slots", convolution(draw, [1] * 5, has_state=[True] * 5, separate=True, **rest)
    yield "3 tokens each", convolution(draw, [3] * 6, has_state=[True] * 6, **rest)


def exact(op: str, device: str) -> Iterator[tuple[str, OpInputs]]:
    """Integers, every width and dtype."""
    for dtype in DTYPES:
        for width in (2, 3, 4):
            draw = Draw(width, dtype, device, exact=True)
            lengths = [1, 2, 3, 20, 65] if op == "conv" else [1] * 5
            inputs = convolution(
                draw, lengths, channels=64, width=width, bias=True, has_state=[True, False, True, True, False]
            )
            yield f"exact {str(dtype).removeprefix('torch.')} W={width}", inputs


def seeded(op: str, device: str, number: int, seed: int = 0) -> tuple[str, OpInputs]:
    """Case `number`."""
    dice = random.Random(f"conv {op} {seed} {number}")
    n = dice.choice((1, 2, 3, 5, 9))
    lengths = [1] * n if op == "conv-update" else [_length(dice) for _ in range(n)]
    dtype, width = dice.choice(DTYPES), dice.choice((2, 3, 4))
    inputs = convolution(
        Draw(dice.randrange(1 << 30), dtype, device),
        lengths,
        channels=dice.choice(CHANNELS),
        width=width,
        bias=dice.random() < 0.5,
        has_state=[dice.random() < 0.6 for _ in range(n)],
        padded=[i for i in range(n) if dice.random() < 0.1] if dice.random() < 0.3 else [],
    )
    return f"seeded {number}", inputs


def _length(dice: random.Random) -> int:
    return dice.choice(EDGES) if dice.random() < 0.6 else dice.randint(1, 300)
