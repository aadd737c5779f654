"""The pools, and what runs on them: one interface for real kernels and for the reference.

The idea: a bookkeeper's plan is executed literally. A call's rows are split as vLLM's layer splits them
(gdn_linear_attn.py): verifies go to a kernel of their own, everything else to the prefill kernel if any row
is a prefill, to the decode kernel otherwise. A kernel that works in place reads and writes one slot, so where
a plan reads one and writes another the state is copied first, as engines copy a block.

`Reference` runs in this process: the rule in float64, rounded once where a kernel rounds (to the pool's dtype
and the output's), which is what a test of bookkeeping wants. Real kernels are in `machine_kernels`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Literal, Protocol

import msgspec
import torch
from torch import Tensor

from ...kernels.contract import Capabilities, Contract
from ...kernels.interface import KernelCall, KernelInfo, RunResult
from ...reference.conv import causal_conv
from ...reference.recurrence import recurrence
from .bookkeeping import PaddedPlan, RowPlan
from .tokens import Sizes

Role = Literal["prefill", "decode", "verify"]


class Pools:
    """The engine's two pools of slots, zero at the start as engines allocate them."""

    def __init__(self, slots: int, sizes: Sizes, state_dtype: torch.dtype) -> None:
        shape = (slots, sizes.v_heads, sizes.key_dim, sizes.value_dim)
        self.state = torch.zeros(shape, dtype=state_dtype)
        """[slots, HV, K, V]."""
        shape_of_conv = (slots, sizes.channels, sizes.taps - 1)
        self.conv = torch.zeros(shape_of_conv, dtype=getattr(torch, sizes.dtype))
        """[slots, D, W-1], oldest input first."""


class Group(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The rows of a call that go to one kernel, with their tokens packed in that order."""

    role: Role
    rows: tuple[RowPlan, ...]
    lengths: tuple[int, ...]
    tensors: dict[str, Tensor]
    """q, k, v, g, beta and `conv_input` [T, D], `conv_weight` [D, W]."""
    padded: tuple[PaddedPlan, ...] = ()

    @property
    def offsets(self) -> Tensor:
        """[N+1] int64."""
        return torch.tensor([0, *self.lengths]).cumsum(0)


class Answer(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a machine made of a group; the pools have changed meanwhile."""

    status: str = "ok"
    """`ok`, or why there is no answer: error, timeout, crash, refused."""
    message: str = ""
    output: Tensor | None = None
    """[T, HV, V]."""
    conv_output: Tensor | None = None
    """[T, D]; None: this machine runs no conv."""
    rounded_between: bool = False
    """A verify ran token by token, its state rounded to the pool's dtype in between."""
    notes: tuple[str, ...] = ()


Asked = tuple[str, KernelCall]
"""(role, call) that somebody is to run; roles are those of the rule, `conv` and `conv_update`."""
Talk = Generator[Asked, RunResult, Answer]


class Machine(Protocol):
    """Runs groups on pools. It asks for kernel calls and is sent their results, so that whoever drives it may
    run the calls of many histories side by side."""

    @property
    def sizes(self) -> Sizes: ...

    def info(self, role: Role) -> KernelInfo:
        """The kernel of a role."""

    def conv_info(self, role: Role) -> KernelInfo:
        """The convolution beside it."""

    def run(self, group: Group, pools: Pools) -> Talk:
        """Run one group and change the pools."""


def states_read(group: Group, pool: Tensor) -> Tensor:
    """[N, ...] what the rows read, zero where they are fresh."""
    read = pool[[row.read for row in group.rows]].clone()
    for i, row in enumerate(group.rows):
        if row.fresh:
            read[i] = 0
    return read


def conv_read(group: Group, pool: Tensor) -> Tensor:
    """[N, D, W-1] what the rows' convs read."""
    read = pool[[row.conv_read for row in group.rows]].clone()
    for i, row in enumerate(group.rows):
        if row.fresh:
            read[i] = 0
    return read


def conv_reference(group: Group, pools: Pools, sizes: Sizes) -> Tensor:
    """The conv in float64: its output [T, D], and the last inputs after each row (or token of a verify)."""
    x, window = group.tensors["conv_input"], conv_read(group, pools.conv)
    convolved, windows = causal_conv(x, group.tensors["conv_weight"], None, window, group.offsets)
    at = group.offsets.tolist()
    for i, row in enumerate(group.rows):
        if len(row.conv_writes) == 1:
            pools.conv[row.conv_writes[0]] = windows[i].to(pools.conv.dtype)
            continue
        seen = torch.cat([window[i], x[at[i] : at[i + 1]].T], 1)
        for j, slot in enumerate(row.conv_writes):
            pools.conv[slot] = seen[:, j + 1 : j + sizes.taps]
    dtype: torch.dtype = getattr(torch, sizes.dtype)
    rounded: Tensor = convolved.to(dtype)
    return rounded


REFERENCE_INFO = KernelInfo(
    name="reference",
    capabilities=Capabilities(default_chunk_size=None, profile="fla-recurrent", slots=True),
    contract=Contract(kernel="reference"),
    environment={"device": "cpu"},
)


class Reference:
    """The rule and the conv in float64, rounded once per output and per state that is written."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes, self._info = sizes, REFERENCE_INFO

    @property
    def sizes(self) -> Sizes:
        return self._sizes

    def info(self, role: Role) -> KernelInfo:
        return self._info

    def conv_info(self, role: Role) -> KernelInfo:
        return self._info

    def run(self, group: Group, pools: Pools) -> Talk:
        """Asks for nothing."""
        yield from ()
        x = group.tensors
        dtype = getattr(torch, self.sizes.dtype)
        read = states_read(group, pools.state)
        rule: dict[str, Any] = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
        output, final, *states = recurrence(
            **rule, cu_seqlens=group.offsets, initial_state=read, return_states=group.role == "verify"
        )
        self._write(group, pools, final, states[0] if states else None)
        convolved = conv_reference(group, pools, self.sizes)
        self._scribble(group, pools)
        return Answer(output=output.to(dtype), conv_output=convolved)

    def _write(self, group: Group, pools: Pools, final: Tensor, states: Tensor | None) -> None:
        """The state after each row, or after each token of a verify, into its slot."""
        at = group.offsets.tolist()
        for i, row in enumerate(group.rows):
            for j, slot in enumerate(row.writes):
                state = final[i] if states is None else states[at[i] + j]
                pools.state[slot] = state.to(pools.state.dtype)

    def _scribble(self, group: Group, pools: Pools) -> None:
        """A padded row with a token and an index is run like any other: it writes where it points."""
        for padded in group.padded:
            if padded.slot >= 0 and padded.tokens:
                pools.state[padded.slot] = pools.state[padded.slot] * 0.5 + 1
                pools.conv[padded.slot] = pools.conv[padded.slot].roll(-1, -1) + 1
