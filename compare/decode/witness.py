"""What is true of a decode run, and what an honest one errs, at every checkpoint on the way.

The idea: truth and emulation are carried from checkpoint to checkpoint, so that thousands of steps cost one
pass each. The emulation rounds its state after every token to the dtype that the state is kept in: that, and
not the kernel's own register, is what decoding costs.

Leaves to others: limits and verdicts (`drift`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...capture.case import Case
from ...kernels.contract import Clause
from ...reference.bounds import error_bounds, state_bounds
from ...reference.emulation import EmulationResult
from ...reference.truth import truth
from ..inputs import Inputs, take_sequences
from ..tiles import map_states, map_tokens, unit_roundoff
from ..trial import Trial
from ..witness import DEFAULT_CHUNK, Witness, named
from ..yardstick import U32, Growing, HonestRun, Scale, Yardstick, decay_floors
from .bound import drift_bounds, state_norms
from .stream import SHORT


class DecodeWitness(Witness):
    """A witness of one stream (all sequences equally long), its state kept in one dtype between steps."""

    def __init__(
        self, case: Case, state_dtype: torch.dtype, checkpoints: tuple[int, ...], *, rounds: bool = True,
        device: torch.device | str = "cpu", seed: int = 0,
    ) -> None:  # fmt: skip
        """rounds: the state is stored after every token; else only once, at the end (one call for all)."""
        super().__init__(case, device=device, seed=seed)
        self.state_dtype, self.checkpoints, self.rounds = state_dtype, checkpoints, rounds
        self._states: dict[tuple[str, ...], list[Tensor]] = {}
        self._norms: dict[tuple[str, ...], Tensor] = {}
        self._runs: list[tuple[list[Tensor], float | None]] = []
        self._runs_of: dict[int, list[tuple[list[Tensor], float | None]]] = {}
        if state_dtype != torch.float32:
            # Integers that are exact in float32 need not be so in the pool.
            self.__dict__["is_exact"] = False

    def states(self, clauses: tuple[Clause, ...] = ()) -> list[Tensor]:
        """[N, HV, K, V] float64 after each checkpoint."""
        key = named(clauses)
        if key not in self._states:
            found: list[Tensor] = []
            for part in self._parts(self.inputs_under(clauses), found):
                found.append(truth(**part.keywords())[1])
            self._states[key] = found
        return self._states[key]

    def _parts(self, inputs: Inputs, states: list[Tensor]) -> Iterator[Inputs]:
        """The stream from checkpoint to checkpoint; each part starts from the last of `states`."""
        everyone = list(range(inputs.n_sequences))
        for start, stop in pairwise((0, *self.checkpoints)):
            part = take_sequences(
                inputs, everyone, skip=[start] * len(everyone), tokens=[stop] * len(everyone)
            )
            if states:
                part = msgspec.structs.replace(part, initial_state=states[-1])
            yield part

    def honest_result(self, run: HonestRun) -> EmulationResult:
        """One honest run, checkpoint by checkpoint; its states are remembered."""
        if self.rounds and self.state_dtype != torch.float32:
            precision = run.precision.with_casts(state=SHORT[self.state_dtype])
            run = HonestRun(run.inputs, precision, run.chunk_size, run.variant, cap=run.cap)
        states: list[Tensor] = []
        output: Tensor | None = None
        spans = pairwise((0, *self.checkpoints))
        for part, (start, stop) in zip(self._parts(run.inputs, states), spans, strict=True):
            result = run.on(part)()
            if output is None:
                output = result.output.new_zeros(run.inputs.n_tokens, *result.output.shape[1:])
            steps = torch.arange(start, stop, device=output.device)
            output[(run.inputs.cu_seqlens[:-1, None] + steps).flatten()] = result.output
            states.append(result.final_state)
        assert output is not None
        self._runs.append((states, run.cap))
        return EmulationResult(output=output, final_state=states[-1])

    def yardstick(
        self, profile: str, chunk_size: int | None, clauses: tuple[Clause, ...] = (), **options: Any
    ) -> Yardstick:
        """As every witness's; the runs that it is made of are kept beside it."""
        self._runs = []
        found = super().yardstick(profile, chunk_size, clauses, **options)
        if self._runs:
            self._runs_of[id(found)] = self._runs
        return found

    def state_scales(self, trial: Trial) -> list[Scale]:
        """What honest runs err in the state after each checkpoint, by which a kernel is judged."""
        runs = self._runs_of[id(trial.yardstick)]
        inputs, tiles = self.inputs_under(trial.clauses), map_states(self.inputs.n_sequences, self.device)
        everyone = list(range(inputs.n_sequences))
        tokenwise = trial.capabilities_chunk is None and trial.device_type == "cuda"
        scales = []
        for number, (stop, true) in enumerate(zip(self.checkpoints, self.states(trial.clauses), strict=True)):
            growing = Growing(tiles, true)
            for states, cap in runs:
                growing.add(states[number], cap=cap)
            prefix = take_sequences(inputs, everyone, tokens=[stop] * len(everyone))
            tokens = map_tokens(prefix.cu_seqlens, trial.capabilities_chunk or DEFAULT_CHUNK)
            floor = decay_floors(prefix, tokens, tiles, fast_exp=tokenwise)[1]
            scales.append(growing.scale(floor, float32=inputs.v.dtype == torch.float32))
        return scales

    def state_limits(self, trial: Trial) -> list[Tensor]:
        """[N, HV] after each checkpoint: how far rounding can take a state; inf where nothing bounds it.

        A kernel that works in chunks has tier 2's bound, a recurrent one the sharper one of `bound`.
        """
        inputs, limits = self.inputs_under(trial.clauses), []
        everyone = list(range(inputs.n_sequences))
        if trial.capabilities_chunk is None:
            key = named(trial.clauses)
            if key not in self._norms:
                self._norms[key] = state_norms(inputs)
            stored = unit_roundoff(self.state_dtype) if self.rounds else 0.0
            raw = inputs.l2norm and trial.info.capabilities.l2norm == "before"
            operand = unit_roundoff(inputs.k.dtype) if raw else U32
            drift = drift_bounds(inputs, self._norms[key], stored=stored, operand=operand)
            last = unit_roundoff(self.state_dtype)
            rows = inputs.cu_seqlens[:-1]
            return [drift[rows + n - 1] + last * self._norms[key][rows + n - 1] for n in self.checkpoints]
        for stop in self.checkpoints:
            prefix = take_sequences(inputs, everyone, tokens=[stop] * len(everyone))
            bound = error_bounds(**prefix.keywords(), roundoffs=trial.roundoffs).final
            bounded = state_bounds(**prefix.keywords()).final_contracting
            limits.append(torch.where(bounded, bound, torch.inf))
        return limits
