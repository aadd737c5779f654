"""Exact companion: the kernel on an exact case of the same shape as the one in question.

Statement. A fault of addressing (a wrong sequence, head, token, slot, layout or mask) depends on shapes, not
on values; so it shows on a case of the same lengths, heads, dims and states whose answer is exact, where no
tolerance can hide it and every wrong integer names the token that was read (`exact`).
Fires and is silent as `exact`; not run for a kernel that takes seconds per call.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

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
# In other lengths: another call shape, so it decides only where nothing else does.
REGROUPED = "exact-regrouped"
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def plans(witness: Witness, *, seed: int) -> dict[str, Case]:
    """The companions of a case by check: one of its own lengths, one of as many tokens in other lengths.

    The second is for what a kernel keeps from call to call under less than it depends on: indices of chunks
    under the number of tokens, say. Empty where there is none (no tokens, other dtypes, decay per channel).
    """
    lengths = witness.inputs.cu_seqlens.diff().tolist()
    kinds = _kinds(witness.case, len(lengths))
    own = plan(witness, lengths, kinds, seed=seed)
    other = regrouped(lengths, kinds)
    again = None if other is None else plan(witness, *other, seed=seed + 1)
    return {name: twin for name, twin in ((NAME, own), (REGROUPED, again)) if twin is not None}


def regrouped(lengths: list[int], kinds: list[str]) -> tuple[list[int], list[str]] | None:
    """As many tokens in other lengths; None where there is no other way (equal lengths, one token).

    Sequences change places, so that shapes stay; a single one is cut behind its first third.
    """
    if len(lengths) == 1:
        return ([cut, lengths[0] - cut], kinds * 2) if (cut := lengths[0] // 3) else None
    for by in range(1, len(lengths)):
        turned = lengths[by:] + lengths[:by]
        if turned != lengths:
            return turned, kinds[by:] + kinds[:by]
    return None


def plan(witness: Witness, lengths: list[int], kinds: list[str], *, seed: int) -> Case | None:
    """An exact case of a case's heads, dims and dtypes, and of these lengths and kinds of states."""
    inputs = witness.inputs
    state = inputs.initial_state
    if inputs.n_tokens == 0 or inputs.v.dtype not in DTYPES or inputs.g.ndim == 3:
        return None
    if state is not None and state.dtype not in DTYPES:
        return None
    return TWINS.made(
        "exact-raw" if inputs.l2norm else "exact",
        lengths=tuple(lengths),
        k_heads=inputs.q.shape[1],
        v_heads=inputs.heads,
        dims=(inputs.q.shape[2], inputs.v.shape[2]),
        dtype=DTYPES[inputs.v.dtype],
        beta_dtype=DTYPES.get(inputs.beta.dtype, "fp32"),
        state=tuple(kinds),
        state_dtype="fp32" if state is None else DTYPES[state.dtype],
        seed=seed,
    )


class Twins:
    """Companions made lately, with their truths: kernels of a diff and cases of a shape need the same.

    Cases are kept up to `bytes_kept`, truths (which lie on a device) of the last few.
    """

    def __init__(self, bytes_kept: int = 1 << 30, witnesses_kept: int = 4) -> None:
        self.bytes_kept, self.witnesses_kept = bytes_kept, witnesses_kept
        self._cases: OrderedDict[tuple[Any, ...], Case] = OrderedDict()
        self._witnesses: OrderedDict[tuple[int, str], Witness] = OrderedDict()

    def made(self, family: str, **arguments: Any) -> Case:
        """The case of these arguments of `capture.make.make`."""
        key = (family, *sorted(arguments.items()))
        if key not in self._cases:
            case = make(family, **arguments)
            self._cases[key] = case
            while len(self._cases) > 1 and sum(map(_bytes, self._cases.values())) > self.bytes_kept:
                self._cases.popitem(last=False)
        self._cases.move_to_end(key)
        return self._cases[key]

    def witness(self, twin: Case, device: torch.device) -> Witness:
        """What is true of a companion. The witness holds its case, so an id that is a key stays taken."""
        key = (id(twin), str(device))
        if key not in self._witnesses:
            self._witnesses[key] = Witness(twin, device=device)
            while len(self._witnesses) > self.witnesses_kept:
                self._witnesses.popitem(last=False)
        self._witnesses.move_to_end(key)
        return self._witnesses[key]


def _bytes(case: Case) -> int:
    return sum(x.numel() * x.element_size() for x in case.tensors.values())


TWINS = Twins()


def _kinds(case: Case, n_sequences: int) -> list[str]:
    """random where a sequence brings a state, stale where it starts fresh beside one that does."""
    if case.get("initial_state") is None and case.get("pool") is None:
        return ["none"] * n_sequences
    fresh = case.get("has_initial_state")
    return ["random"] * n_sequences if fresh is None else ["random" if f else "stale" for f in fresh.tolist()]


def check(
    twin: Case, info: KernelInfo, result: RunResult, *, device: torch.device, name: str = NAME
) -> Outcome:
    """Judge the kernel's answer to a companion."""
    if result.status != "ok":
        status = "suspect" if result.status in ("crash", "timeout") else "not-applicable"
        reason = f"the kernel answered the case but not an exact case of its shape: {result.message}"
        return Outcome(check=name, tier=TIER, status=status, reason=reason)  # type: ignore[arg-type]
    witness = TWINS.witness(twin, device)
    fault = shape.check(witness.inputs, result.outputs)
    if fault.status == "fires":
        return Outcome(check=name, tier=TIER, status="fires", reason=fault.reason, place=fault.place)
    trial = Trial(witness, info, result.outputs["output"], result.outputs["final_state"])
    return compare_exactly(trial, name, info.contract.relation("exact"))
