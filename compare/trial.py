"""A trial: one kernel's answer to one case, beside the witness it is measured against.

The idea: every check reads the same frozen measurements (errors per row, masks), which are computed once
on first use. A check takes a trial and returns an `Outcome`; it runs nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..kernels.contract import Clause
from ..kernels.interface import KernelInfo
from ..reference.bounds import ErrorBounds, Roundoffs, StateBounds, smallest_error
from ..reference.precision import precision_for
from .clauses import transforms_of
from .nonfinite import NonFinite, compare_masks
from .tiles import RowErrors, TileErrors, TileMap, row_errors, tile_errors, unit_roundoff
from .witness import Pair, Witness
from .yardstick import GENERIC, OTHER_CHUNKS, Yardstick

TENSORS = ("output", "state")


@dataclass(frozen=True)
class Measured:
    """One returned tensor against the truth."""

    got: Tensor
    """[R, H, ...] as the kernel returned it, on the verdict's device."""
    want: Tensor
    """The same shape, float64."""
    tiles: TileMap
    rows: RowErrors
    masks: NonFinite

    @cached_property
    def by_tile(self) -> TileErrors:
        return tile_errors(self.rows, self.tiles)

    @property
    def relative(self) -> float:
        """Global RMS error over the truth's RMS; NaN where the kernel is not finite and the truth is."""
        if self.masks.n_unexplained:
            return float("nan")
        square, truth = float(self.rows.square.sum()), float(self.rows.truth_square.sum())
        if square == 0:
            return 0.0
        return float("inf") if truth == 0 else (square / truth) ** 0.5


class Trial:
    """What a kernel returned for a case. `output` and `state` have passed the shape check."""

    def __init__(self, witness: Witness, info: KernelInfo, output: Tensor, state: Tensor | None) -> None:
        self.witness = witness
        self.info = info
        self.output = output.to(witness.device)
        self.state = None if state is None else state.to(witness.device)

    @property
    def capabilities_chunk(self) -> int | None:
        return self.info.capabilities.default_chunk_size

    @property
    def profile(self) -> str:
        """Precision profile that the kernel declares; `generic` where it declares none."""
        declared = self.info.capabilities.profile or self.info.contract.value("precision.profile")
        return str(declared or GENERIC)

    @property
    def reach_chunk(self) -> int:
        """Tokens over which a NaN may spread backwards: the chunk; if unknown, the largest usual one."""
        return max(OTHER_CHUNKS) if self.profile == GENERIC else self.capabilities_chunk or 1

    @cached_property
    def clauses(self) -> tuple[Clause, ...]:
        """Declared transforms that touch this case."""
        return self.witness.relevant(transforms_of(self.info.contract))

    @cached_property
    def truth(self) -> Pair:
        """The truth under the kernel's clauses."""
        return self.witness.truth(self.clauses)

    @property
    def state_bounds(self) -> StateBounds:
        """Tier 1, under the kernel's clauses: a floored decay keeps what the pure one forgets."""
        return self.witness.state_bounds(self.clauses)

    @property
    def error_bounds(self) -> ErrorBounds:
        """Tier 2, under the kernel's clauses and with its round-offs."""
        return self.witness.error_bounds(self.roundoffs, self.clauses)

    @cached_property
    def measured(self) -> dict[str, Measured]:
        """`output` and, where one was returned, `state`."""
        return self.measure(self.truth)

    def measure(self, truth: Pair) -> dict[str, Measured]:
        """Errors against a truth (pure or under clauses)."""
        pairs = {"output": (self.output, truth[0], self.witness.output_tiles(self.capabilities_chunk))}
        if self.state is not None:
            pairs["state"] = (self.state, truth[1], self.witness.state_tiles)
        return {
            name: Measured(got, want, tiles, row_errors(got, want), compare_masks(got, want))
            for name, (got, want, tiles) in pairs.items()
        }

    def without(self, tensors: Collection[str]) -> Trial:
        """The same answer with some tensors left out of judgement; measurements are shared."""
        other = Trial(self.witness, self.info, self.output, None if "state" in tensors else self.state)
        other.__dict__["truth"] = self.truth
        other.__dict__["measured"] = {n: m for n, m in self.measured.items() if n not in tensors}
        return other

    @cached_property
    def yardstick(self) -> Yardstick:
        before = self.info.capabilities.l2norm == "before"
        return self.witness.yardstick(
            self.profile,
            self.capabilities_chunk,
            self.clauses,
            l2norm_before=before,
            device=self.device_type,
        )

    @cached_property
    def roundoffs(self) -> Roundoffs:
        """Unit round-offs from the declared profile, for the running bound."""
        inputs = self.witness.inputs
        precision = precision_for(self.profile, device=self.device_type, chunk_size=self.capabilities_chunk)
        operand = unit_roundoff(inputs.v.dtype)
        if inputs.beta.dtype != inputs.v.dtype:
            operand = max(operand, unit_roundoff(inputs.beta.dtype))
        if any(fmt == "tf32" for fmt in precision.dots.values()):
            operand = max(operand, 2.0**-10)
        state = self.state.dtype if self.state is not None else torch.float32
        stored = 0.0 if state == torch.float32 else unit_roundoff(state)
        return Roundoffs(
            state=2.0**-24,
            accumulate=2.0**-24,
            operand=operand,
            output=unit_roundoff(self.output.dtype),
            stored_state=stored,
            underflow=smallest_error(inputs.v.dtype),
            output_underflow=smallest_error(self.output.dtype),
            state_underflow=0.0 if self.state is None else smallest_error(self.state.dtype),
        )

    @property
    def device_type(self) -> str:
        """Where the kernel ran (tf32 exists on a GPU only)."""
        return str(self.info.environment.get("device", self.witness.device.type)).split(":")[0]
