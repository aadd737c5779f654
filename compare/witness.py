"""The witness: everything that a case's answers are compared with, computed once and shared by all kernels.

The idea: truth, bounds and yardsticks depend on the case and on what a contract declares, not on any
kernel's answer; so they are computed on first use and kept. It judges nothing.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ..capture.case import Case
from ..kernels.contract import Clause
from ..reference.bounds import ErrorBounds, Roundoffs, StateBounds, error_bounds, state_bounds
from ..reference.emulation import EmulationResult
from ..reference.exact import is_exact
from ..reference.truth import truth
from .clauses import changes_anything, under
from .inputs import Inputs, inputs_of
from .tiles import TileMap, map_states, map_tokens
from .yardstick import HonestRun, Yardstick, measure

# Chunk that tiles are counted in for a kernel that works without chunks.
DEFAULT_CHUNK = 64

Pair = tuple[Tensor, Tensor]


def named(clauses: tuple[Clause, ...]) -> tuple[str, ...]:
    """Clauses as a key: contracts hold values that cannot be hashed."""
    return tuple(f"{c.id}={c.value}" for c in clauses)


class Witness:
    """What is true of one case; tensors on the device of the verdict."""

    most_runs: int | None = None
    """Honest runs that a yardstick takes at most; None: all."""

    def __init__(self, case: Case, *, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.case = case
        self.seed = seed
        self.inputs: Inputs = inputs_of(case, device)
        self._truths: dict[tuple[str, ...], Pair] = {}
        self._yardsticks: dict[tuple[object, ...], Yardstick] = {}
        self._output_maps: dict[int, TileMap] = {}
        self._state_bounds: dict[tuple[str, ...], StateBounds] = {}
        self._error_bounds: dict[tuple[Roundoffs, tuple[str, ...]], ErrorBounds] = {}
        # What others measure once per case (the stages' yardsticks), under keys of their own.
        self.kept: dict[tuple[object, ...], object] = {}

    @property
    def device(self) -> torch.device:
        return self.inputs.device

    def relevant(self, clauses: tuple[Clause, ...]) -> tuple[Clause, ...]:
        """The clauses that change anything about this case."""
        return tuple(c for c in clauses if changes_anything(self.inputs, c))

    def inputs_under(self, clauses: tuple[Clause, ...] = ()) -> Inputs:
        return under(self.inputs, clauses)

    def truth(self, clauses: tuple[Clause, ...] = ()) -> Pair:
        """(output [T, HV, V], final state [N, HV, K, V]) in float64, pure or under transform clauses."""
        key = named(clauses)
        if key not in self._truths:
            output, state = truth(**self.inputs_under(clauses).keywords())
            self._truths[key] = (output, state)
        return self._truths[key]

    def output_tiles(self, chunk_size: int | None) -> TileMap:
        size = DEFAULT_CHUNK if chunk_size is None else chunk_size
        if size not in self._output_maps:
            self._output_maps[size] = map_tokens(self.inputs.cu_seqlens, size)
        return self._output_maps[size]

    @cached_property
    def is_exact(self) -> bool:
        """Whether every intermediate of this case is an exact integer: nothing to round (tier 0)."""
        x = self.inputs
        if x.g.ndim == 3:
            return False
        state_dtype = torch.float32 if x.initial_state is None else x.initial_state.dtype
        report = is_exact(
            x.q,
            x.k,
            x.v,
            x.g,
            x.beta,
            scale=x.scale,
            initial_state=x.initial_state,
            cu_seqlens=x.cu_seqlens,
            state_dtype=state_dtype,
            l2norm=x.l2norm,
        )
        return report.exact

    @cached_property
    def state_tiles(self) -> TileMap:
        return map_states(self.inputs.n_sequences, self.device)

    def state_bounds(self, clauses: tuple[Clause, ...] = ()) -> StateBounds:
        """Tier 1, of the function that the clauses declare; only for finite inputs."""
        key = named(clauses)
        if key not in self._state_bounds:
            self._state_bounds[key] = state_bounds(**self.inputs_under(clauses).keywords())
        return self._state_bounds[key]

    def error_bounds(self, roundoffs: Roundoffs, clauses: tuple[Clause, ...] = ()) -> ErrorBounds:
        """Tier 2, of the function that the clauses declare; only for finite inputs."""
        key = (roundoffs, named(clauses))
        if key not in self._error_bounds:
            self._error_bounds[key] = error_bounds(
                **self.inputs_under(clauses).keywords(), roundoffs=roundoffs
            )
        return self._error_bounds[key]

    def yardstick(
        self,
        profile: str,
        chunk_size: int | None,
        clauses: tuple[Clause, ...] = (),
        *,
        l2norm_before: bool = False,
        device: str | None = None,
    ) -> Yardstick:
        """Tier 3's denominators for a precision profile and algorithm.

        l2norm_before: the kernel is handed raw q and k normalised and rounded. device: where the kernel ran.
        """
        l2norm_before = l2norm_before and self.inputs.l2norm
        key = (profile, chunk_size, named(clauses), l2norm_before, device)
        if key not in self._yardsticks:
            self._yardsticks[key] = measure(
                self.inputs_under(clauses),
                self.truth(clauses),
                (self.output_tiles(chunk_size), self.state_tiles),
                profile=profile,
                chunk_size=chunk_size,
                seed=self.seed,
                l2norm_before=l2norm_before,
                device=device,
                make=self.honest_result,
                most_runs=self.most_runs,
            )
        return self._yardsticks[key]

    def honest_result(self, run: HonestRun) -> EmulationResult:
        """How an honest run of this case is made; a witness of several calls makes it in as many."""
        return run()
