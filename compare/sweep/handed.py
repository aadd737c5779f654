"""A witness for calls that hand the state on: the same truth, and a yardstick that hands it on too.

The idea: cutting a prefill must not change the truth, but a state kept in bfloat16 between calls costs
digits that the kernel is not to blame for. So the emulation and its honest variants are cut at the same
tokens, their states rounded to the pool's dtype in between, and tier 3 asks whether the kernel errs more.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...kernels.contract import Clause
from ...reference.emulation import EmulationResult
from ..axes.schedule import Step
from ..inputs import Inputs
from ..witness import Witness
from ..yardstick import HonestRun, Scale, Yardstick


class HandedWitness(Witness):
    """A witness of the uncut case for answers that came in several calls."""

    def __init__(self, whole: Witness, steps: list[Step], state_dtype: torch.dtype) -> None:
        """whole: the witness of the same case in one call; its truth and bounds are shared, not repeated."""
        self.__dict__.update(whole.__dict__)
        self._yardsticks = {}
        self.kept = {}
        self.steps, self.state_dtype = steps, state_dtype
        if state_dtype != torch.float32:
            # Integers that are exact in float32 need not be so in the pool.
            self.__dict__["is_exact"] = False

    def honest_result(self, run: HonestRun) -> EmulationResult:
        """One honest run, call by call, the state handed on as the engine hands it on."""
        inputs = run.inputs
        key, (heads, value) = inputs.q.shape[-1], inputs.v.shape[1:]
        state = inputs.initial_state
        if state is None:
            state = inputs.v.new_zeros(inputs.n_sequences, heads, key, value, dtype=torch.float32)
        state = state.float().clone()
        output: Tensor | None = None
        for step in self.steps:
            part, rows, numbers = _part(inputs, step, state)
            result = run.on(part)()
            if output is None:
                output = result.output.new_zeros(inputs.n_tokens, *result.output.shape[1:])
            output[rows] = result.output
            state[numbers] = result.final_state.to(self.state_dtype).float()
        assert output is not None
        return EmulationResult(output=output, final_state=state)


def _part(inputs: Inputs, step: Step, state: Tensor) -> tuple[Inputs, Tensor, Tensor]:
    """The inputs of one call, the packed rows [R] and the sequences [S] that it covers."""
    at = inputs.cu_seqlens.tolist()
    rows = torch.cat([torch.arange(at[s] + a, at[s] + b) for s, a, b in step]).to(inputs.device)
    numbers = torch.tensor([s for s, _, _ in step], device=inputs.device)
    lengths = torch.tensor([0, *(b - a for _, a, b in step)], device=inputs.device)
    changed = {name: getattr(inputs, name)[rows] for name in ("q", "k", "v", "g", "beta")}
    part = msgspec.structs.replace(
        inputs, **changed, cu_seqlens=lengths.cumsum(0), initial_state=state[numbers]
    )
    return part, rows, numbers


class StochasticWitness(Witness):
    """A witness for a kernel that rounds at random: its honest error is sqrt(2) times that of nearest."""

    FACTOR = 2.0**0.5

    def __init__(self, witness: Witness) -> None:
        self.__dict__.update(witness.__dict__)
        self._nearest = witness
        self.__dict__["is_exact"] = False

    def yardstick(
        self, profile: str, chunk_size: int | None, clauses: tuple[Clause, ...] = (), **options: Any
    ) -> Yardstick:
        """The yardstick of rounding to nearest, every scale times sqrt(2). options: as Witness takes them."""
        plain = self._nearest.yardstick(profile, chunk_size, clauses, **options)
        return dataclasses.replace(plain, output=self._scaled(plain.output), state=self._scaled(plain.state))

    def _scaled(self, scale: Scale) -> Scale:
        names = ("rms", "peak", "row_rms", "row_peak")
        return dataclasses.replace(scale, **{name: getattr(scale, name) * self.FACTOR for name in names})
