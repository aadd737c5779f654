"""Exact companion: the kernel on an exact case of the same shape as the one in question.

Statement. A fault of addressing (a wrong sequence, head, token, slot, layout or mask) depends on shapes, not
on values; so it shows on a case of the same lengths, heads, dims and states whose answer is exact, where no
tolerance can hide it and every wrong integer names the token that was read (`exact`).
Fires and is silent as `exact`; not run for a kernel that takes seconds per call.
"""

from __future__ import annotations

import torch

from ...capture.case import Case
from ...capture.make import make
from ...kernels.interface import KernelInfo, RunResult
from ..trial import Trial
from ..verdict import Outcome
from ..witness import Witness
from . import shape
from .exact import TIER, compare_exactly

NAME = "exact-companion"
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def plan(witness: Witness, info: KernelInfo, *, seed: int) -> Case | None:
    """The companion of a case; None where there is none (no tokens, other dtypes, decay per channel)."""
    inputs = witness.inputs
    state = inputs.initial_state
    if inputs.n_tokens == 0 or inputs.v.dtype not in DTYPES or inputs.g.ndim == 3:
        return None
    if state is not None and state.dtype not in DTYPES:
        return None
    lengths = (inputs.cu_seqlens[1:] - inputs.cu_seqlens[:-1]).tolist()
    return make(
        "exact-raw" if inputs.l2norm else "exact",
        lengths=lengths,
        k_heads=inputs.q.shape[1],
        v_heads=inputs.heads,
        dims=(inputs.q.shape[2], inputs.v.shape[2]),
        dtype=DTYPES[inputs.v.dtype],
        beta_dtype=DTYPES.get(inputs.beta.dtype, "fp32"),
        state=_kinds(witness.case, len(lengths)),
        state_dtype="fp32" if state is None else DTYPES[state.dtype],
        seed=seed,
    )


def _kinds(case: Case, n_sequences: int) -> list[str]:
    """random where a sequence brings a state, stale where it starts fresh beside one that does."""
    if case.get("initial_state") is None and case.get("pool") is None:
        return ["none"] * n_sequences
    fresh = case.get("has_initial_state")
    return ["random"] * n_sequences if fresh is None else ["random" if f else "stale" for f in fresh.tolist()]


def check(twin: Case, info: KernelInfo, result: RunResult, *, device: torch.device) -> Outcome:
    """Judge the kernel's answer to the companion."""
    if result.status != "ok":
        status = "suspect" if result.status in ("crash", "timeout") else "not-applicable"
        reason = f"the kernel answered the case but not an exact case of its shape: {result.message}"
        return Outcome(check=NAME, tier=TIER, status=status, reason=reason)  # type: ignore[arg-type]
    witness = Witness(twin, device=device)
    fault = shape.check(witness.inputs, result.outputs)
    if fault.status == "fires":
        return Outcome(check=NAME, tier=TIER, status="fires", reason=fault.reason, place=fault.place)
    trial = Trial(witness, info, result.outputs["output"], result.outputs["final_state"])
    return compare_exactly(trial, NAME, info.contract.relation("exact"))
