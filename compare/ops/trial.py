"""One kernel's answer to one operation, measured: errors per row against the truth, and what is honest there.

The idea: tier 3 as for the rule. D is the largest error over the emulations that a sound kernel may be: with
the declared casts, or every known table where none is declared, each plain and with seeded jitter of float32
size, each stored in the dtype that the kernel returned. Limits are `checks.emulation_ratio`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ...kernels.interface import KernelInfo
from ...reference.emulation_ops import OpRounding
from ..nonfinite import compare_masks
from ..tiles import row_errors
from ..trial import Measured
from ..yardstick import U32, Growing, Scale
from .layout import as_rows, tile_map
from .op import Op, OpInputs, Tensors

DRAWS = 4
# exp(A_log), 1 / sqrt: one float32 number, a few roundings off, scales a whole row or head.
SCALAR_ROUNDINGS = 8.0


class OpTrial:
    """What a kernel returned for an operation. Outputs have passed the shape check."""

    def __init__(
        self, op: Op, inputs: OpInputs, info: KernelInfo, outputs: Mapping[str, Tensor], *, seed: int = 0
    ) -> None:
        self.op, self.inputs, self.info, self.seed = op, inputs, info, seed
        device = inputs.cu_seqlens.device
        self.outputs: Tensors = {name: outputs[name].to(device) for name in op.outputs}
        self.clauses = op.transforms(info.contract, inputs)

    @property
    def casts(self) -> dict[str, str]:
        """Declared cast points of this operation."""
        return {
            point: fmt
            for point, fmt in self.info.contract.rounding().items()
            if point.partition(".")[0] == (self.op.points or self.op.name)
        }

    @property
    def declared(self) -> bool:
        """Whether the kernel says how it rounds (an empty table in so many words is one)."""
        return bool(self.casts) or self.info.contract.find("rounding") is not None

    @cached_property
    def under_clauses(self) -> OpInputs:
        return self.op.under(self.inputs, self.clauses)

    @cached_property
    def truth(self) -> Tensors:
        """Float64 outputs under the kernel's clauses."""
        return self.op.truth(self.under_clauses)

    @cached_property
    def measured(self) -> dict[str, Measured]:
        return self.measure(self.truth)

    def measure(self, truth: Mapping[str, Tensor]) -> dict[str, Measured]:
        """Errors of every output against a truth."""
        return {
            name: measured(name, self.outputs[name], truth[name], self.inputs) for name in self.op.outputs
        }

    @cached_property
    def scales(self) -> dict[str, Scale]:
        """The honest error under the kernel's clauses."""
        return self.scales_of(self.under_clauses, self.truth)

    def scales_of(self, inputs: OpInputs, truth: Mapping[str, Tensor]) -> dict[str, Scale]:
        """The honest error of a function: largest over the runs that a sound kernel may be."""
        # One run at a time: of a long prompt each is as large as the output in float32.
        runs = (self.op.emulate(*run) for run in self.runs(inputs))
        return scales(truth, runs, self.outputs, self.inputs)

    def runs(self, inputs: OpInputs) -> list[tuple[OpInputs, OpRounding]]:
        """Inputs (with the form of the function) and rounding of each honest run."""
        return honest_runs(self.op, inputs, self.tables(inputs), self.forms, self.seed)

    def tables(self, inputs: OpInputs) -> Sequence[Mapping[str, str]]:
        """The declared casts; else those of every table that can hold these inputs.

        A format in which a square overflows is no excuse for a kernel that does not say that it has it.
        """
        if self.declared:
            return (self.casts,)
        outside = len(self.op.domain(inputs, {}))
        held = [p for p in self.op.profiles if len(self.op.domain(inputs, p)) <= outside]
        return held or self.op.profiles[:1]

    @property
    def forms(self) -> tuple[Callable[[OpInputs], OpInputs], ...]:
        """The declared way to compute the function, or all that there are."""
        known = self.op.forms
        declared = str(self.info.contract.value(self.op.form)) if self.op.form is not None else ""
        return (known[declared],) if declared in known else tuple(known.values())


def honest_runs(
    op: Op,
    inputs: OpInputs,
    tables: Sequence[Mapping[str, str]],
    forms: Sequence[Callable[[OpInputs], OpInputs]],
    seed: int,
) -> list[tuple[OpInputs, OpRounding]]:
    """Every table and form, plain and jittered."""
    native = inputs.tensors[op.reads].dtype
    weight = None if op.weight is None else inputs.tensors[op.weight].dtype
    found = []
    for casts in tables:
        for own in [form(inputs) for form in forms] or [inputs]:
            seeds = [None, *(seed * 1009 + draw + 1 for draw in range(DRAWS))]
            found += [(own, OpRounding(casts, native, weight, draw)) for draw in seeds]
    return found


def measured(name: str, got: Tensor, want: Tensor, inputs: OpInputs) -> Measured:
    """One output against its truth, by rows."""
    got, want = as_rows(name, got, inputs.heads), as_rows(name, want, inputs.heads)
    return Measured(got, want, tile_map(name, inputs), row_errors(got, want), compare_masks(got, want))


def scales(
    truth: Mapping[str, Tensor],
    runs: Iterable[Mapping[str, Tensor]],
    stored: Mapping[str, Tensor],
    inputs: OpInputs,
    floors: Mapping[str, Tensor] | None = None,
) -> dict[str, Scale]:
    """Largest errors of runs, each rounded to the dtype that a kernel's output is stored in.

    floors: [M, H] relative error per tile that is honest in any case, where it is not the usual one.
    """
    rows = {name: as_rows(name, want, inputs.heads) for name, want in truth.items() if name in stored}
    growing = {name: Growing(tile_map(name, inputs), want) for name, want in rows.items()}
    for run in runs:
        for name, one in growing.items():
            one.add(as_rows(name, run[name].to(stored[name].dtype), inputs.heads))
    found = {}
    for name, want in rows.items():
        floor = (floors or {}).get(name)
        shape = (growing[name].tiles.n_tiles, want.shape[1])
        usual = torch.full(shape, SCALAR_ROUNDINGS * U32, dtype=torch.float64, device=want.device)
        found[name] = growing[name].scale(
            usual if floor is None else floor, float32=stored[name].dtype == torch.float32
        )
    return found
