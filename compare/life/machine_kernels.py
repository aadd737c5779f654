"""Real kernels on the pools: each role's kernel in a worker, driven through the slots that it takes.

The idea: whatever interface a kernel has, a plan is executed literally. A kernel that works in place is given
the pool and the index of the slot that is written, after what is read has been copied there, as an engine
copies a block; one that has state columns is given a row of them and the number that says where it starts;
every other kernel gets its states gathered and its results scattered by its adapter or here. A verify by a
kernel without columns is run token by token, each state in its own slot.

What the sound answer would be is not known here. Kernels without a conv run beside the reference's conv, so
that a bookkeeper's conv slots are checked with any of them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...kernels.interface import KernelCall, KernelInfo, RunOptions, RunResult
from ..checks import slots as slot_checks
from .bookkeeping import PaddedPlan
from .machine import REFERENCE_INFO, Answer, Asked, Group, Pools, Role, Talk, conv_reference
from .tokens import Sizes

Infos = Mapping[str, KernelInfo]
"""Role -> the kernel that plays it: prefill, decode, verify, and maybe conv (of a prefill) and conv_update
(of the other steps); the reference's conv plays what is missing."""


Running = Generator[Asked, RunResult, RunResult]
Convolving = Generator[Asked, RunResult, Tensor | RunResult]


class Part(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One kernel call: a sequence per row, each with one slot to read and one to write."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    fresh: tuple[bool, ...]
    lengths: tuple[int, ...]
    tensors: dict[str, Tensor]
    padded: tuple[PaddedPlan, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class KernelMachine:
    """Runs groups on kernels."""

    def __init__(
        self,
        infos: Infos,
        sizes: Sizes,
        state_dtype: torch.dtype,
        *,
        options: RunOptions = RunOptions(),  # noqa: B008  (frozen)
    ) -> None:
        """options: of every call of the rule; the pool's dtype is added where a kernel must be told."""
        self.options = options
        self.infos, self._sizes, self.state_dtype = infos, sizes, state_dtype
        self._copies_conv = False
        """The conv's kernel leaves its state where it was read."""

    @property
    def sizes(self) -> Sizes:
        return self._sizes

    def info(self, role: Role) -> KernelInfo:
        return self.infos[role]

    def conv_info(self, role: Role) -> KernelInfo:
        return self.infos.get(_conv_role(role), REFERENCE_INFO)

    def run(self, group: Group, pools: Pools) -> Talk:
        role = group.role
        columns = role == "verify" and self.infos[role].capabilities.columns
        if columns:
            result = yield from self._with_columns(group, pools)
        elif role == "verify":
            result = yield from self._token_by_token(group, pools)
        else:
            result = yield from self._rule(role, _part_of(group), pools)
        if result.status != "ok":
            message = result.message or f"the kernel ended with status {result.status}"
            return Answer(status=result.status, message=message)
        conv = yield from self._conv(group, pools)
        if isinstance(conv, RunResult):
            message = conv.message or f"the convolution ended with status {conv.status}"
            return Answer(status=conv.status, message=message)
        between = role == "verify" and not columns
        output = result.outputs["output"][: sum(group.lengths)].cpu()
        return Answer(output=output, conv_output=conv, rounded_between=between)

    def _rule(self, role: Role, part: Part, pools: Pools) -> Running:
        """One call of the rule; the pool has what the kernel left in it."""
        before = pools.state.clone()
        for read, write, fresh in zip(part.reads, part.writes, part.fresh, strict=True):
            if read != write and not fresh:
                pools.state[write] = before[read]
        tensors = {name: _with_padding(part, part.tensors[name]) for name in ("q", "k", "v", "g", "beta")}
        tensors |= _offsets(part)
        carried = self._carried(role)
        tensors |= {
            "pool": pools.state.to(carried, copy=True),
            "slot_indices": torch.tensor([*part.writes, *(p.slot for p in part.padded)]),
            "has_initial_state": torch.tensor([*(not f for f in part.fresh), *(True for _ in part.padded)]),
        }
        result = yield role, KernelCall(tensors=tensors, options=self._options(carried))
        return self._taken(result, tensors, part.writes, pools)

    def _taken(
        self, result: RunResult, tensors: dict[str, Tensor], writes: Sequence[int], pools: Pools
    ) -> RunResult:
        """Take the pool that came back, or put the final states into it."""
        if result.status != "ok":
            return result
        after = result.outputs.get("pool")
        if after is not None and after.shape == pools.state.shape:
            pools.state = after.cpu().to(self.state_dtype).clone()
        else:
            states = slot_checks.final_states(tensors, result.outputs)
            if states is None or states.shape[1:] != pools.state.shape[1:]:
                message = "it returned no final state of the right shape"
                return RunResult(status="error", message=message)
            for i, write in enumerate(writes):
                pools.state[write] = states[i].cpu().to(self.state_dtype)
        output = result.outputs.get("output")
        if output is None or output.shape != tensors["v"].shape:
            shape = None if output is None else list(output.shape)
            message = f"the output has shape {shape}, not {list(tensors['v'].shape)}"
            return RunResult(status="error", message=message)
        return result

    def _with_columns(self, group: Group, pools: Pools) -> Running:
        """A verify in one call: a row of columns per sequence, the one that it starts from among them."""
        part = _part_of(group)
        rows = [_columns_of(row.read, row.writes) for row in group.rows]
        width = max(len(columns) for columns, _ in rows)
        indices = [columns + [-1] * (width - len(columns)) for columns, _ in rows]
        indices += [[p.slot] * width for p in part.padded]
        accepted = [number for _, number in rows] + [1] * len(part.padded)
        tensors = {name: _with_padding(part, part.tensors[name]) for name in ("q", "k", "v", "g", "beta")}
        tensors |= _offsets(part)
        carried = self._carried("verify")
        tensors |= {
            "pool": pools.state.to(carried, copy=True),
            "slot_indices": torch.tensor(indices),
            "num_accepted": torch.tensor(accepted),
            "has_initial_state": torch.tensor([*(not f for f in part.fresh), *(True for _ in part.padded)]),
        }
        result = yield "verify", KernelCall(tensors=tensors, options=self._options(carried))
        return self._taken(result, tensors, [row.writes[-1] for row in group.rows], pools)

    def _token_by_token(self, group: Group, pools: Pools) -> Running:
        """A verify by a kernel without columns: one call per token, each state in the slot of its token."""
        output: Tensor | None = None
        result = RunResult(status="error", message="a verify of no token")
        for token in range(max(group.lengths)):
            part, rows = _token_of(group, token)
            result = yield from self._rule("verify", part, pools)
            if result.status != "ok":
                return result
            got = result.outputs["output"].cpu()
            if output is None:
                output = torch.zeros(sum(group.lengths), *got.shape[1:], dtype=got.dtype)
            output[rows] = got[: len(rows)]
        assert output is not None
        return msgspec.structs.replace(result, outputs={"output": output})

    def _carried(self, role: Role) -> torch.dtype:
        """dtype in which a call is given the pool."""
        name = str(self.state_dtype).removeprefix("torch.")
        return self.state_dtype if name in self.infos[role].capabilities.state_dtypes else torch.float32

    def _options(self, carried: torch.dtype) -> RunOptions:
        name = str(carried).removeprefix("torch.")
        return msgspec.structs.replace(self.options, state_dtype=None if name == "float32" else name)

    def _conv(self, group: Group, pools: Pools) -> Convolving:
        """The conv of a group; its pool has changed."""
        role = _conv_role(group.role)
        if role not in self.infos:
            return conv_reference(group, pools, self.sizes)
        if group.role != "verify":
            return (yield from self._conv_call(role, _conv_part(group), pools))
        # The window that a kernel keeps over a draft is its own affair; here each call has one token.
        output: Tensor | None = None
        for token in range(max(group.lengths)):
            part, rows = _token_of(group, token, conv=True)
            got = yield from self._conv_call(role, part, pools)
            if isinstance(got, RunResult):
                return got
            if output is None:
                output = torch.zeros(sum(group.lengths), got.shape[1], dtype=got.dtype)
            output[rows] = got
        assert output is not None
        return output

    def _conv_call(self, role: str, part: Part, pools: Pools) -> Convolving:
        """One call of the conv. A kernel that cannot write elsewhere is given a copy of what it reads."""
        before = pools.conv.clone()
        separate = part.reads != part.writes
        if separate and self._copies_conv:
            self._copy_conv(part, before, pools)
        # A conv update takes as many tokens of every row, so rows without one are not its business.
        part = msgspec.structs.replace(part, padded=tuple(p for p in part.padded if p.tokens))
        tensors = {
            "conv_input": _with_padding(part, part.tensors["conv_input"]),
            "conv_weight": part.tensors["conv_weight"],
            "conv_pool": pools.conv.clone(),
            "slot_indices": torch.tensor([*part.writes, *(p.slot for p in part.padded)]),
            "has_initial_state": torch.tensor([*(not f for f in part.fresh), *(True for _ in part.padded)]),
            **_offsets(part),
        }
        if separate and not self._copies_conv:
            tensors["read_slot_indices"] = torch.tensor([*part.reads, *(p.slot for p in part.padded)])
        result = yield role, KernelCall(tensors=tensors, options=RunOptions())
        if result.status == "refused" and separate and not self._copies_conv:
            self._copies_conv = True
            return (yield from self._conv_call(role, part, pools))
        if result.status != "ok":
            return result
        after = result.outputs.get("conv_pool")
        if after is None or after.shape != pools.conv.shape:
            return RunResult(
                status="error", message=f"{self.infos[role].name} returned no conv_pool of the right shape"
            )
        pools.conv = after.cpu().to(pools.conv.dtype).clone()
        return result.outputs["conv_output"][: part.tokens].cpu()

    @staticmethod
    def _copy_conv(part: Part, before: Tensor, pools: Pools) -> None:
        for read, write, fresh in zip(part.reads, part.writes, part.fresh, strict=True):
            if not fresh:
                pools.conv[write] = before[read]


def _conv_role(role: Role) -> str:
    return "conv" if role == "prefill" else "conv_update"


def _columns_of(read: int, writes: tuple[int, ...]) -> tuple[list[int], int]:
    """A sequence's columns of a verify, and which of them it starts from, counted from 1."""
    if read in writes:
        return list(writes), writes.index(read) + 1
    return [*writes, read], len(writes) + 1


def _part_of(group: Group) -> Part:
    rows = group.rows
    return Part(
        reads=tuple(r.read for r in rows), writes=tuple(r.writes[-1] for r in rows),
        fresh=tuple(r.fresh for r in rows), lengths=group.lengths, tensors=group.tensors, padded=group.padded,
    )  # fmt: skip


def _conv_part(group: Group) -> Part:
    rows = group.rows
    return msgspec.structs.replace(
        _part_of(group),
        reads=tuple(r.conv_read for r in rows),
        writes=tuple(r.conv_writes[-1] for r in rows),
    )


def _token_of(group: Group, token: int, *, conv: bool = False) -> tuple[Part, Tensor]:
    """Token number `token` of the rows that have one, and where it stands in the group's packing."""
    chosen = [i for i, n in enumerate(group.lengths) if n > token]
    rows = group.offsets[chosen] + token
    each: dict[str, Any] = {
        name: x if name == "conv_weight" else x[rows] for name, x in group.tensors.items()
    }
    mine = [group.rows[i] for i in chosen]
    slots = [(r.conv_read, r.conv_writes) if conv else (r.read, r.writes) for r in mine]
    part = Part(
        reads=tuple(read if token == 0 else writes[token - 1] for read, writes in slots),
        writes=tuple(writes[token] for _, writes in slots),
        fresh=tuple(r.fresh and token == 0 for r in mine),
        lengths=(1,) * len(mine),
        tensors=each,
        padded=group.padded if token == 0 else (),
    )
    return part, rows


def _with_padding(part: Part, x: Tensor) -> Tensor:
    """A tensor of tokens with those of padded rows behind: they repeat the first."""
    count = sum(p.tokens for p in part.padded)
    return torch.cat([x, x[:1].expand(count, *x.shape[1:])]) if count else x


def _offsets(part: Part) -> dict[str, Tensor]:
    lengths = [*part.lengths, *(p.tokens for p in part.padded)]
    return {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}
