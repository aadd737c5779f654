"""The witness of many cases at once: their sequences packed into one case, judged with one truth.

The idea: truth, bounds and emulation treat every sequence by itself, and each operation on a case of 200
tokens costs about as much as on one of 6,000. So cases that share heads, dims, dtypes and options are put
behind one another, and the yardstick is made once for all; only small tiles must not be pooled across cases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...capture.case import Case
from ...kernels.contract import Clause
from ...reference.emulation import EmulationResult
from ..axes.recase import joined
from ..axes.schedule import Step
from ..sweep.handed import HandedWitness
from ..witness import Witness
from ..yardstick import HonestRun, Scale, Yardstick

PLAIN = ("fuzz", "plain")


class _KeepsPlain(Witness):
    """Keeps the plain emulation's result, by the key PLAIN of `kept`."""

    def yardstick(
        self, profile: str, chunk_size: int | None, clauses: tuple[Clause, ...] = (), **options: Any
    ) -> Yardstick:
        """One of few runs is not to be looser anywhere: no limit widens for an error of few roundings."""
        found = super().yardstick(profile, chunk_size, clauses, **options)
        if self.most_runs is None:
            return found
        return dataclasses.replace(found, output=_strict(found.output), state=_strict(found.state))

    def honest_result(self, run: HonestRun) -> EmulationResult:
        result = super().honest_result(run)
        # The first run without a variant is the plain one; those after it invert or round otherwise.
        if run.variant is None:
            self.kept.setdefault(PLAIN, result)
        return result


def _strict(scale: Scale) -> Scale:
    return dataclasses.replace(scale, few=torch.zeros_like(scale.few))


class _KeepsPlainHanded(_KeepsPlain, HandedWitness):
    """The same for calls that hand the state on."""


@dataclasses.dataclass(frozen=True)
class Joined:
    """Several cases as one."""

    witness: Witness
    case_of_sequence: Tensor
    """[N] int64, on the verdict's device."""
    n_cases: int

    @property
    def case_of_row(self) -> Tensor:
        """[T] int64: which case a packed token belongs to."""
        cu = self.witness.inputs.cu_seqlens
        return torch.repeat_interleave(self.case_of_sequence, cu[1:] - cu[:-1])

    def rows_of(self, tensor: str) -> Tensor:
        """[R] int64: which case a row of the output or of the state belongs to."""
        return self.case_of_row if tensor == "output" else self.case_of_sequence


def join(
    cases: Sequence[Case],
    schedules: Sequence[Sequence[Step]],
    *,
    chunk_sizes: Sequence[int | None],
    state_dtype: torch.dtype,
    device: str,
    seed: int,
    most_runs: int | None,
) -> Joined:
    """Pack cases (in order) into one witness. schedules: the calls in which each was run.

    most_runs: honest runs of the yardstick; None: all.
    """
    counts = torch.tensor([case.n_sequences for case in cases])
    whole: Witness = _KeepsPlain(joined(cases), device=device, seed=seed)
    whole.most_runs = most_runs
    of_sequence = torch.repeat_interleave(torch.arange(len(cases)), counts).to(whole.device)
    for size in chunk_sizes:
        tiles = whole.output_tiles(size)
        key = tiles.chunk_size
        assert key is not None
        whole._output_maps[key] = dataclasses.replace(tiles, group=of_sequence[tiles.sequence])
    whole.__dict__["state_tiles"] = dataclasses.replace(whole.state_tiles, group=of_sequence)
    steps = merged(schedules, counts.tolist())
    if len(steps) > 1 or state_dtype != torch.float32:
        whole = _KeepsPlainHanded(whole, steps, state_dtype)
    return Joined(whole, of_sequence, len(cases))


def merged(schedules: Sequence[Sequence[Step]], counts: Sequence[int]) -> list[Step]:
    """The schedules of several cases as one: step i holds every case's step i, sequences renumbered."""
    n_steps = max((len(s) for s in schedules), default=0)
    steps: list[Step] = [[] for _ in range(n_steps)]
    first = 0
    for schedule, count in zip(schedules, counts, strict=True):
        for number, step in enumerate(schedule):
            steps[number] += [(first + sequence, a, b) for sequence, a, b in step]
        first += count
    return steps
