"""How two cases differ: per tensor whether it is there, its dtype, shape, largest difference and first token.

The idea: equal bits are said to be equal, and anything else is told by how much and where first, with
NaN, +Inf and -Inf as values of their own. Header differences are listed by key.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from ..capture.case import Case
from ..capture.validate import PER_TOKEN
from ..reference.domain_place import locate

Status = Literal["equal", "differs", "dtype", "shape", "only-in-first", "only-in-second"]


class TensorDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor in two cases."""

    name: str
    status: Status
    """`dtype`: the same numbers in another dtype."""
    dtypes: tuple[str | None, str | None]
    shapes: tuple[list[int] | None, list[int] | None]
    n_different: int = 0
    max_abs: float | None = None
    """Largest absolute difference of entries finite in both; None where there is none to take."""
    sequence: int | None = None
    token: int | None = None
    """First differing token inside its sequence (of the first case); None for tensors without tokens."""
    index: list[int] | None = None
    """First differing entry."""
    values: tuple[float, float] | None = None
    """The two values there."""


class CaseDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Two cases side by side."""

    first: str
    second: str
    same: bool
    """Every tensor has the same bits' values, dtype and shape, and the call options agree."""
    tensors: list[TensorDifference]
    header: dict[str, tuple[Any, Any]]
    """Keys of op, options, origin and model_config whose values differ."""


def casediff(first: Case, second: Case) -> CaseDifference:
    """Compare two cases. Raises nothing: whatever differs is in the result."""
    names = sorted(first.tensors.keys() | second.tensors.keys())
    tensors = [_tensor(name, first, second) for name in names]
    header = _header(first, second)
    decisive = any(key == "op" or key.startswith("options.") for key in header)
    return CaseDifference(
        first=str(first.path or first.label),
        second=str(second.path or second.label),
        same=all(t.status == "equal" for t in tensors) and not decisive,
        tensors=tensors,
        header=header,
    )


def _tensor(name: str, first: Case, second: Case) -> TensorDifference:
    a, b = first.get(name), second.get(name)
    dtypes = _dtype(a), _dtype(b)
    shapes = _shape(a), _shape(b)
    if a is None or b is None:
        status: Status = "only-in-second" if a is None else "only-in-first"
        return TensorDifference(name=name, status=status, dtypes=dtypes, shapes=shapes)
    if a.shape != b.shape:
        return TensorDifference(name=name, status="shape", dtypes=dtypes, shapes=shapes)
    x, y = a.double(), b.double()
    different = ~((x == y) | (x.isnan() & y.isnan()))
    count = int(different.sum())
    if not count:
        status = "equal" if a.dtype == b.dtype else "dtype"
        return TensorDifference(name=name, status=status, dtypes=dtypes, shapes=shapes)
    index = [int(i) for i in different.nonzero()[0]]
    finite = (x - y).abs()[torch.isfinite(x) & torch.isfinite(y)]
    sequence = token = None
    cu = first.get("cu_seqlens")
    if name in PER_TOKEN and cu is not None:
        sequence, token = locate(cu, index[0])
    return TensorDifference(
        name=name, status="differs", dtypes=dtypes, shapes=shapes, n_different=count,
        max_abs=float(finite.max()) if finite.numel() else None, sequence=sequence, token=token, index=index,
        values=(float(x[tuple(index)]), float(y[tuple(index)])),
    )  # fmt: skip


def _header(first: Case, second: Case) -> dict[str, tuple[Any, Any]]:
    a, b = _flat(first), _flat(second)
    return {key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}


def _flat(case: Case) -> dict[str, Any]:
    flat: dict[str, Any] = {"op": case.op}
    for group in ("options", "origin", "model_config"):
        for key, value in msgspec.to_builtins(getattr(case, group)).items():
            flat[f"{group}.{key}"] = value
    return flat


def _dtype(tensor: Tensor | None) -> str | None:
    return None if tensor is None else str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: Tensor | None) -> list[int] | None:
    return None if tensor is None else list(tensor.shape)
