"""What a capture is asked and what it found: the values that pass between the parent and its child.

The idea: both ends speak in these structs as JSON, one document a line, so the process that holds the
model needs to know nothing of the command line and the other nothing of transformers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .checkpoint import What
from .weights import LayerWeights


class CaptureRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One capture, every choice made and checked by the parent as far as it can."""

    directory: str
    """The checkpoint."""
    out: str
    """Directory that the child writes cases to; the parent made it and moves them on."""
    layers: list[int]
    what: What = "core"
    ids: list[int] | None = None
    """Token ids; None: the child tokenizes `text`."""
    text: str | None = None
    tokens_path: str = ""
    split: int | list[int] | None = None
    decode: int = 0
    early_stop: bool = False
    device: str = "auto"
    dtype: str = "auto"
    device_map: str | None = None
    offload_folder: str | None = None
    max_memory: dict[str, str] = {}
    backend: Literal["auto", "torch", "installed"] = "auto"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What will be written, told before anything is."""

    n_tokens: int
    lengths: list[int]
    layers: list[int]
    what: What
    decode: int
    bytes: int


class CapturedCase(msgspec.Struct, frozen=True, kw_only=True):
    """One file that was written."""

    path: str
    layer: int
    call: int
    phase: str
    n_tokens: int
    bytes: int
    finite: bool


class Logits(msgspec.Struct, frozen=True, kw_only=True):
    """The control: is what the model ends in finite under transformers?"""

    checked: bool
    reason: str = ""
    """Why not, where not."""
    n_positions: int = 0
    n_nonfinite: int = 0
    """Positions with at least one NaN or Inf."""
    first: dict[str, Any] | None = None
    """{"call", "token", "class"} of the first of them; the token counts from the start of the array."""


class CaptureResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a capture found and wrote; `verdict` fails on non-finite logits or inputs and on bad weights."""

    verdict: Literal["pass", "fail"]
    reason: str
    model: str
    model_class: str
    layers: list[int]
    what: What
    n_tokens: int
    token_hash: str
    lengths: list[int]
    cases: list[CapturedCase]
    bytes: int
    logits: Logits
    weights: list[LayerWeights]
    engine: str
    backends: list[str]
    generated: list[int] = []
    seconds: float = 0.0

    def document(self) -> dict[str, Any]:
        """The JSON document of `gdncheck capture --json`."""
        return {"schema": 1, "command": "capture", **msgspec.to_builtins(self)}


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line from the child."""

    kind: Literal["note", "plan", "result", "bad-input", "cannot-run"]
    text: str = ""
    plan: Plan | None = None
    result: CaptureResult | None = None
