"""A case: the inputs of one GDN call, how it was called and where it came from.

The idea: one frozen value that every layer passes on unchanged. Tensors are kept in the canonical
packed layout (shared design, section 4) with the dtype they had; nothing here knows about files
(`casefile`) or about any kernel's own layout (adapters convert).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from .columns import start_slots

Op = Literal["rule", "core", "verify"]


class CallOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the rule was called; what a tensor alone cannot tell."""

    qk: Literal["raw", "normalised"] = "normalised"
    """Are q and k before (`raw`: the rule must l2-normalise them) or after l2norm."""
    scale: float | None = None
    """Factor on the output; None means K**-0.5."""
    gate_space: Literal["log", "linear"] = "log"
    """Space of g: natural log (canonical) or the linear decay exp(g)."""
    rms_eps: float = 1e-6
    """Epsilon of the gated RMSNorm (core only)."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a case came from."""

    kind: Literal["synthetic", "capture", "import", "derived"] = "synthetic"
    family: str | None = None
    """Generator family of a synthetic case, e.g. `qwen`, `exact`."""
    seed: int | None = None
    model: str | None = None
    """Model name or directory base name; never an absolute path."""
    model_class: str | None = None
    layer: int | None = None
    call: int | None = None
    """0-based number of the call of this layer in the captured run."""
    phase: str | None = None
    """`prefill` or `decode`."""
    token_hash: str | None = None
    """sha256 of the int64 token ids of the whole run."""
    engine: str | None = None
    backend: str | None = None
    """Kernel that the engine really ran."""
    note: str | None = None


class Case(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The inputs of one GDN call."""

    op: Op = "rule"
    tensors: dict[str, Tensor]
    """Canonical tensors by name: q, k [T, HK, K]; v [T, HV, V]; g [T, HV] or [T, HV, K] float32
    natural log; beta [T, HV]; cu_seqlens [N+1] int64; and the optional ones of the design."""
    options: CallOptions = CallOptions()
    origin: Origin = Origin()
    model_config: dict[str, Any] = {}
    fingerprint: dict[str, Any] = {}
    """Software and hardware that made the case."""
    finite: bool = True
    """The maker's claim that every tensor is finite (checked on reading)."""
    content_hash: str | None = None
    path: Path | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(name)

    @property
    def n_tokens(self) -> int:
        return self.tensors["v"].shape[0]

    @property
    def n_sequences(self) -> int:
        return self.tensors["cu_seqlens"].shape[0] - 1

    @property
    def scale(self) -> float:
        """Factor on the output, K**-0.5 where the call gave none."""
        given = self.options.scale
        return float(self.tensors["q"].shape[-1]) ** -0.5 if given is None else given

    @property
    def lengths(self) -> list[int]:
        cu = self.tensors["cu_seqlens"]
        return (cu[1:] - cu[:-1]).tolist()

    @property
    def label(self) -> str:
        """What tables print: the file's stem, else layer and call, else the family."""
        if self.path is not None:
            return self.path.stem
        if self.origin.layer is not None:
            return f"layer{self.origin.layer:03d}.call{self.origin.call or 0:04d}"
        return self.origin.family or "case"

    def with_tensors(self, **changed: Tensor | None) -> Case:
        """The same case with some tensors replaced (None removes one); no longer a file's content."""
        tensors = {**self.tensors}
        for name, value in changed.items():
            if value is None:
                tensors.pop(name, None)
            else:
                tensors[name] = value
        origin = msgspec.structs.replace(self.origin, kind="derived")
        return msgspec.structs.replace(self, tensors=tensors, origin=origin, content_hash=None, path=None)


def starting_state(case: Case) -> Tensor | None:
    """The state each sequence starts from, [N, HV, K, V], or None for zeros.

    Gathers from `pool` by `slot_indices` where the case has a pool (of a verify step, the column that the
    step before left), and puts exact zeros where
    `has_initial_state` says that a sequence starts fresh (whatever its slot holds, NaN included).
    """
    state = case.get("initial_state")
    if state is None and case.get("pool") is not None:
        pool, slots = case["pool"], start_slots(case.tensors)
        # A padding index (negative) owns no slot: it starts from zeros.
        state = torch.zeros(len(slots), *pool.shape[1:], dtype=pool.dtype, device=pool.device)
        owned = slots >= 0
        state[owned] = pool[slots[owned]]
    if state is None:
        return None
    fresh = case.get("has_initial_state")
    if fresh is None:
        return state
    return torch.where(fresh.bool().view(-1, 1, 1, 1), state, torch.zeros_like(state))
