"""A case looked at without running a kernel: what it holds, whether the input is sound, what to expect.

The idea: `inspect` returns one value with everything; the terminal text and the JSON are two views of it.
The domain findings are `reference.domain`'s; nothing here judges a kernel.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from ..capture.case import Case, starting_state
from ..capture.casefile import bytes_on_disk
from ..reference.domain import DomainFinding, check_domain, describe
from ..reference.overflow import OverflowPrediction, predict_overflow
from .inputs import inputs_of

SCHEMA = 1
QUANTILES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
SAMPLE = 1_000_000  # numbers that quantiles are taken from; evenly spaced, so the same on every run


class TensorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the case."""

    name: str
    dtype: str
    shape: list[int]
    bytes: int
    nonfinite: int
    """Entries that are NaN or Inf."""


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known of a case before a kernel runs."""

    case: str
    op: str
    tokens: int
    lengths: list[int]
    bytes: int
    content_hash: str | None
    options: dict[str, Any]
    origin: dict[str, Any]
    tensors: list[TensorRow]
    sound: bool
    """No finding is `bad-input` or `outside`."""
    findings: list[dict[str, Any]]
    """kind, severity, tensor, sequence, head, token, value, count, consequence, text."""
    statistics: dict[str, dict[str, float]]
    """Quantiles by name: g, decay, beta, key_norm, key_cosine (neighbouring keys), value_norm, state_norm."""
    overflow: dict[str, Any]
    """Predicted first chunk size at which a kernel that factors exp(G_i) exp(-G_j) overflows; null: none."""


def inspect(case: Case) -> Inspection:
    """Look at a case. Runs no kernel and changes nothing; raises nothing for bad values."""
    inputs = inputs_of(case)
    findings = findings_of(case)
    return Inspection(
        case=str(case.path) if case.path is not None else case.label,
        op=case.op,
        tokens=case.n_tokens,
        lengths=case.lengths,
        bytes=case.path.stat().st_size if case.path is not None else bytes_on_disk(case),
        content_hash=case.content_hash,
        options=msgspec.to_builtins(case.options),
        origin={k: v for k, v in msgspec.to_builtins(case.origin).items() if v is not None},
        tensors=[_row(name, tensor) for name, tensor in case.tensors.items()],
        sound=all(f.severity == "hint" for f in findings),
        findings=[_finding(f) for f in findings],
        statistics=statistics_of(case),
        overflow=_overflow(predict_overflow(inputs.g, inputs.cu_seqlens)),
    )


def findings_of(case: Case) -> list[DomainFinding]:
    """The domain check of a case, with its own options."""
    pool = case.get("pool")
    return check_domain(
        case["q"], case["k"], case["v"], case["g"], case["beta"],
        cu_seqlens=case["cu_seqlens"], initial_state=starting_state(case),
        qk=case.options.qk, gate_space=case.options.gate_space, scale=case.options.scale,
        slot_indices=case.get("slot_indices"), n_slots=None if pool is None else pool.shape[0],
    )  # fmt: skip


def statistics_of(case: Case) -> dict[str, dict[str, float]]:
    """Quantiles of what decides how hard a case is; names as in Inspection.statistics."""
    inputs = inputs_of(case)
    state = inputs.initial_state
    numbers: dict[str, Tensor] = {
        "g": inputs.g.double(),
        "decay": inputs.g.double().exp(),
        "beta": inputs.beta.double(),
        "key_norm": inputs.k.double().norm(dim=-1),
        "key_cosine": neighbour_cosines(inputs.k, inputs.cu_seqlens),
        "value_norm": inputs.v.double().norm(dim=-1),
    }
    if state is not None:
        numbers["state_norm"] = state.double().flatten(2).norm(dim=-1)
    return {name: _quantiles(x) for name, x in numbers.items() if x.numel()}


def neighbour_cosines(k: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Cosine between each key and the one before it in its sequence, [pairs, HK]; 0 where a row is zero."""
    unit = torch.nn.functional.normalize(k.double(), dim=-1)
    inside = torch.ones(max(len(k) - 1, 0), dtype=torch.bool, device=k.device)
    starts = cu_seqlens[1:-1]
    inside[starts[(starts > 0) & (starts < len(k))] - 1] = False
    return (unit[1:] * unit[:-1]).sum(-1)[inside]


def _quantiles(x: Tensor) -> dict[str, float]:
    flat = x.reshape(-1)
    flat = flat[:: max(1, len(flat) // SAMPLE)]
    # Extremes come from all entries, the quantiles between from the evenly spaced sample.
    ordered = flat.sort().values
    at = [ordered[round(p * (len(ordered) - 1))] for p in QUANTILES]
    at[0], at[-1] = x.amin(), x.amax()
    return {f"{100 * p:g}%": float(value) for p, value in zip(QUANTILES, at, strict=True)}


def _row(name: str, tensor: Tensor) -> TensorRow:
    bad = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
    return TensorRow(
        name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape),
        bytes=tensor.numel() * tensor.element_size(), nonfinite=bad,
    )  # fmt: skip


def _finding(found: DomainFinding) -> dict[str, Any]:
    names = ("kind", "severity", "tensor", "sequence", "head", "token", "value", "count", "consequence")
    return {name: getattr(found, name) for name in names} | {"text": describe(found)}


def _overflow(predicted: OverflowPrediction) -> dict[str, Any]:
    return {
        "chunk_size": predicted.chunk_size,
        "decay_sum": predicted.decay_sum,
        "row": predicted.row,
        "head": predicted.head,
        "largest": {str(size): value for size, value in predicted.largest.items()},
    }
