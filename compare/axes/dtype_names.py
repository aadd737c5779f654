"""Names of dtypes: `bf16`, as the command line writes them, and `bfloat16`, as torch does."""

from __future__ import annotations

import torch

SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LONG = ("float32", "bfloat16", "float16")
_PAIRS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def long_name(text: str) -> str:
    """`bfloat16` of either spelling; other words as they are."""
    return _PAIRS.get(text, text)


def short_name(text: str) -> str:
    """`bf16` of either spelling; other words as they are."""
    return {v: k for k, v in _PAIRS.items()}.get(text, text)


def short_of(dtype: torch.dtype) -> str:
    """`bf16` of torch.bfloat16."""
    return short_name(str(dtype).removeprefix("torch."))
