"""Decode: a call run token by token, as many calls as its longest sequence has tokens.

The idea: an engine decodes one token per sequence and call and keeps the state in its pool in between, in
the pool's dtype. Doing that loop here, beside the kernel, makes thousands of steps affordable: nothing
crosses the worker's pipe until they are done.

Leaves to others: what a kernel does with one call (its adapter), prefill followed by decode (compare).
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from ..capture.case import Case, starting_state
from ..capture.errors import Refused
from . import layouts
from .interface import Adapter, KernelCall

PER_TOKEN = ("q", "k", "v", "g", "beta", "a", "b")


def run_stepwise(adapter: Adapter, call: KernelCall) -> dict[str, Tensor]:
    """`output` [T, HV, V], `final_state` [N, HV, K, V], and `step_states` [M, N, HV, K, V].

    step_states: the states after each number of tokens of `options.keep_states`; a sequence that has ended
    keeps its last one. The state between calls has `options.state_dtype` (None: as the call gives it,
    float32 where it gives none); a kernel that cannot hold that dtype is handed it widened to float32.
    Raises Refused for a pool with padded rows; what the kernel raises passes through.
    """
    tensors, options = call.tensors, call.options
    if "slot_indices" in tensors and bool((tensors["slot_indices"] < 0).any()):
        raise Refused("a padded row owns no state to step; leave it out of a call that is run token by token")
    v = tensors["v"]
    starts = tensors["cu_seqlens"].long()
    lengths = starts.diff()
    state = _first_state(tensors)
    dtype = layouts.DTYPES[options.state_dtype] if options.state_dtype else state.dtype
    held = adapter.describe().capabilities.state_dtypes
    carried = dtype if layouts.dtype_name(dtype) in held else torch.float32
    name = layouts.dtype_name(carried) if options.state_dtype and carried == dtype else None
    one = msgspec.structs.replace(options, stepwise=False, keep_states=(), state_dtype=name)
    state = state.to(dtype)
    output: Tensor | None = None
    kept: list[Tensor] = []
    evidence: dict[str, Any] = {}
    for step in range(int(lengths.max()) if len(lengths) else 0):
        running = (lengths > step).nonzero().flatten()
        rows = starts[running] + step
        given = {key: tensors[key][rows] for key in PER_TOKEN if key in tensors}
        given |= {key: tensors[key] for key in ("A_log", "dt_bias") if key in tensors}
        given["cu_seqlens"] = torch.arange(len(rows) + 1, dtype=torch.int64, device=v.device)
        given["initial_state"] = state[running].to(carried)
        found = adapter.run(KernelCall(tensors=given, options=one))
        if output is None:
            output = found["output"].new_zeros(v.shape[0], *found["output"].shape[1:])
            evidence = dict(getattr(adapter, "evidence", {}))
        output[rows] = found["output"]
        state[running] = found["final_state"].to(dtype)
        if step + 1 in options.keep_states:
            kept.append(state.clone())
    if output is None:
        output = torch.zeros_like(v)
    steps = int(lengths.max()) if len(lengths) else 0
    kept += [state.clone() for number in options.keep_states if number > steps]
    results = {"output": output, "final_state": state}
    if kept:
        results["step_states"] = torch.stack(kept)
    adapter.evidence = evidence | {"steps": steps, "state_kept_in": layouts.dtype_name(dtype)}  # type: ignore[attr-defined]
    return results


def _first_state(tensors: dict[str, Tensor]) -> Tensor:
    """[N, HV, K, V]: zeros in float32 where the call has no state."""
    found = starting_state(Case(tensors=tensors))
    if found is not None:
        return found.clone()
    n, v = tensors["cu_seqlens"].shape[0] - 1, tensors["v"]
    return torch.zeros(n, v.shape[1], tensors["k"].shape[-1], v.shape[-1], device=v.device)
