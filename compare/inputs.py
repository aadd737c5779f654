"""A case as the truth, the emulation and the bounds read it: one value, on the device of the verdict.

The idea: whatever the case file allows (a pool of slots, a linear gate, raw q and k) is brought to the one
canonical form here and nowhere else, so that every yardstick sees the same numbers as the kernel does.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from ..capture.case import Case, starting_state
from ..kernels.interface import KernelCall, RunOptions


class Inputs(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The arguments of the rule."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    """[T, HV] or [T, HV, K], natural log."""
    beta: Tensor
    cu_seqlens: Tensor
    """[N+1] int64."""
    initial_state: Tensor | None
    """[N, HV, K, V]: gathered from the pool, zero where a sequence starts fresh; None for zeros."""
    scale: float
    l2norm: bool
    """q and k are raw: the rule normalises them."""
    l2norm_eps: float = 1e-6

    @property
    def n_tokens(self) -> int:
        return self.v.shape[0]

    @property
    def n_sequences(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def heads(self) -> int:
        return self.v.shape[1]

    @property
    def device(self) -> torch.device:
        return self.v.device

    def keywords(self) -> dict[str, Any]:
        """For `truth` and the bounds, which share a signature."""
        names = ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state", "scale", "l2norm", "l2norm_eps")
        return {name: getattr(self, name) for name in names}


def take_sequences(
    inputs: Inputs, numbers: list[int], *, tokens: list[int] | None = None, skip: list[int] | None = None
) -> Inputs:
    """Some sequences as a call of their own: of each its first `tokens`, or what follows its first `skip`.

    Initial states go with their sequences, also where the first tokens are skipped.
    """
    cu = inputs.cu_seqlens.cpu()
    starts = [int(cu[n]) + (skip[i] if skip else 0) for i, n in enumerate(numbers)]
    stops = [int(cu[n]) + tokens[i] if tokens else int(cu[n + 1]) for i, n in enumerate(numbers)]
    rows = torch.cat([torch.arange(a, b) for a, b in zip(starts, stops, strict=True)]).to(inputs.device)
    lengths = torch.tensor([0, *(b - a for a, b in zip(starts, stops, strict=True))])
    state = inputs.initial_state
    chosen = torch.tensor(numbers, device=inputs.device)
    return msgspec.structs.replace(
        inputs,
        **{name: getattr(inputs, name)[rows] for name in ("q", "k", "v", "g", "beta")},
        cu_seqlens=lengths.cumsum(0).to(inputs.device),
        initial_state=None if state is None else state[chosen],
    )


def inputs_of(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Bring a case to canonical form on a device."""

    def moved(name: str) -> Tensor:
        return case[name].to(device)

    state = starting_state(case)
    g = moved("g")
    if case.options.gate_space == "linear":
        g = g.log()
    return Inputs(
        q=moved("q"),
        k=moved("k"),
        v=moved("v"),
        g=g,
        beta=moved("beta"),
        cu_seqlens=moved("cu_seqlens").long(),
        initial_state=None if state is None else state.to(device),
        scale=case.scale,
        l2norm=case.options.qk == "raw",
    )


RULE_TENSORS = (
    "q",
    "k",
    "v",
    "g",
    "beta",
    "cu_seqlens",
    "initial_state",
    "has_initial_state",
    "pool",
    "slot_indices",
    "draft",
    "num_accepted",
)


def call_of(case: Case, **options: Any) -> KernelCall:
    """The call that a kernel is given: the case's own tensors, and how they are to be read."""
    tensors = {name: case[name] for name in RULE_TENSORS if case.get(name) is not None}
    if case.options.gate_space == "linear":
        tensors["g"] = tensors["g"].log()
    tensors["cu_seqlens"] = tensors["cu_seqlens"].long()
    return KernelCall(tensors=tensors, options=RunOptions(scale=case.scale, qk=case.options.qk, **options))
