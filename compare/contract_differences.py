"""Contract differences: declared transforms without which an answer would not agree with the truth.

The idea: an answer has two errors, against the pure truth and against the truth under the kernel's clauses.
Where only the second is explained by rounding, the kernel computes a slightly different function and says
so; each clause that matters is named with its size. Applying clauses is `clauses`, judging is `judge`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.contract import Clause
from .checks import emulation_ratio
from .clauses import transforms_of
from .tiles import row_errors, tile_errors, unit_roundoff
from .trial import TENSORS, Trial
from .verdict import ContractDifference


def errors_against_pure(trial: Trial) -> dict[str, float | None]:
    """Global relative RMS error of each tensor against the truth without clauses."""
    measured = trial.measured if not trial.clauses else trial.measure(trial.witness.truth())
    return {name: measured[name].relative if name in measured else None for name in TENSORS}


def contract_differences(trial: Trial) -> tuple[ContractDifference, ...]:
    """The clauses that explain a departure from the pure truth, with their sizes; () where none departs."""
    clauses = trial.witness.relevant(transforms_of(trial.info.contract))
    if not clauses or trial.witness.inputs.g.ndim == 3:
        return ()
    pure = emulation_ratio.against(trial, trial.measure(trial.witness.truth()))
    if pure.status != "fires":
        return ()
    return tuple(d for d in (_difference(trial, clause) for clause in clauses) if d is not None)


def _difference(trial: Trial, clause: Clause) -> ContractDifference | None:
    pure, other = trial.witness.truth(), trial.witness.truth((clause,))
    maps = (trial.witness.output_tiles(trial.capabilities_chunk), trial.witness.state_tiles)
    size = 0.0
    for want, got, tiles in zip(pure, other, maps, strict=True):
        table = tile_errors(row_errors(got, want), tiles)
        share = (table.rms / table.truth_rms)[table.truth_rms > 0]
        size = max(size, float(share.max()) if share.numel() else 0.0)
    if size == 0:
        return None
    tokens = moved_tokens(pure[0], other[0], unit_roundoff(trial.output.dtype))
    value = f"{clause.value:g}" if isinstance(clause.value, float) else str(clause.value)
    text = f"{clause.id.replace('.', ' ')} {value}: {tokens} tokens, {percent(size)}"
    return ContractDifference(clause=clause.id, size=size, tokens=tokens, text=text)


def moved_tokens(pure: Tensor, other: Tensor, roundoff: float) -> int:
    """Tokens with a head whose output row moves by more than the round-off of what is stored. [T, HV, V]."""
    moved = torch.linalg.vector_norm(other - pure, dim=-1) > roundoff * torch.linalg.vector_norm(pure, dim=-1)
    return int(moved.any(-1).sum())


def percent(share: float) -> str:
    """`12 %`, `0.034 %`."""
    return f"{100 * share:.2g} %"
