"""The stages of fla's chunk kernel, one by one, in the canonical stage layout.

The idea: fla's forward pass is a chain of functions, so the chain can be walked here with every value
kept, or one link of it fed with given values, which tells an error made in a stage from one handed on.
Canonical: cumsum [T, HV] natural log; kkt, solve [T, HV, C]; w [T, HV, K]; u, v_new, output [T, HV, V];
h [chunks, HV, K, V], the state at the start of each chunk, chunks in the order of the sequences;
final_state [N, HV, K, V].

Where a version fuses links (0.5 and later: kkt and solve at chunk size 64), the fused stage is `solve`
and has the inputs of both. Those versions keep the gate to base 2; it is converted on the way out
(to float64, so that feeding it back gives the same bits) and on the way in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..capture.errors import Refused
from . import layouts
from .fla_package import FlaPackage, parameters
from .interface import KernelCall, RunOptions

# Stage -> what it needs beyond the call's own tensors, and what it gives.
INPUTS = {
    "cumsum": (),
    "kkt": ("cumsum",),
    "solve": ("kkt",),
    "wu": ("solve", "cumsum"),
    "state": ("w", "u", "cumsum"),
    "output": ("v_new", "h", "cumsum"),
}
FUSED_SOLVE_INPUTS = ("cumsum",)
OUTPUTS = {
    "cumsum": ("cumsum",),
    "kkt": ("kkt",),
    "solve": ("solve",),
    "wu": ("w", "u"),
    "state": ("h", "v_new", "final_state"),
    "output": ("output",),
}


def stage_inputs(package: FlaPackage, chunk_size: int) -> dict[str, tuple[str, ...]]:
    """Stages that this version has at this chunk size, in order, with the earlier values that each reads."""
    if not _fuses(package, chunk_size):
        return dict(INPUTS)
    return {
        name: FUSED_SOLVE_INPUTS if name == "solve" else needs
        for name, needs in INPUTS.items()
        if name != "kkt"
    }


def stages(
    package: FlaPackage, arguments: dict[str, Any], chunk_size: int, options: RunOptions
) -> dict[str, Tensor]:
    """Walk the whole chain; every value by name.

    arguments: the public function's keywords, in fla's layout ([1, T, heads, dim]).
    """
    chain = _Chain(package, arguments, chunk_size)
    values: dict[str, Tensor] = {}
    for name in stage_inputs(package, chunk_size):
        values.update(chain.run(name, values))
    return _canonical(chain, values, options)


def run_stage(
    package: FlaPackage, name: str, call: KernelCall, arguments: dict[str, Any]
) -> dict[str, Tensor]:
    """Run one stage on given inputs, canonical in and out.

    call.tensors: the case's tensors and, under their names, the values that `stage_inputs` lists, in any
    floating dtype; they are rounded to what the stage would have been handed.
    Raises Refused for a stage that this version does not have alone, or where an input is missing.
    """
    chunk_size = call.options.chunk_size or 64
    known = stage_inputs(package, chunk_size)
    if name not in known:
        fused = " (kkt is part of solve there)" if name == "kkt" else ""
        raise Refused(
            f"stage {name!r}: fla-core {package.version} at chunk size {chunk_size} has "
            f"{', '.join(known)}{fused}"
        )
    missing = [need for need in known[name] if need not in call.tensors]
    if missing:
        raise Refused(f"stage {name} needs {', '.join(missing)} among the call's tensors")
    chain = _Chain(package, arguments, chunk_size)
    given = {need: chain.accept(need, call.tensors[need]) for need in known[name]}
    return _canonical(chain, chain.run(name, given), call.options)


def with_checkpoints(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results of a walk, and the states at the starts of its chunks as `checkpoints`."""
    kept: dict[str, Tensor] = {name: values[name] for name in ("output", "final_state") if name in values}
    return {**kept, "checkpoints": values["h"]}


def _fuses(package: FlaPackage, chunk_size: int) -> bool:
    return package.fused and chunk_size == 64


def _canonical(chain: _Chain, values: dict[str, Tensor], options: RunOptions) -> dict[str, Tensor]:
    result = {name: chain.give(name, value) for name, value in values.items() if value is not None}
    wanted = options.state_dtype
    if wanted is not None and "final_state" in result:
        result["final_state"] = result["final_state"].to(layouts.DTYPES[wanted])
    return result


class _Chain:
    """One version's stage functions on one call's tensors."""

    def __init__(self, package: FlaPackage, arguments: dict[str, Any], chunk_size: int) -> None:
        self.package, self.size = package, chunk_size
        self.base2 = package.fused
        self.q, self.k, self.v = arguments["q"], arguments["k"], arguments["v"]
        if arguments["use_qk_l2norm_in_kernel"]:
            normalise = package.stage("l2norm_fwd")
            self.q, self.k = normalise(self.q)[0], normalise(self.k)[0]
        self.g, self.beta, self.scale = arguments["g"], arguments["beta"], arguments["scale"]
        self.state, self.cu_seqlens = arguments["initial_state"], arguments["cu_seqlens"]
        self.want_state = arguments["output_final_state"]

    def accept(self, name: str, value: Tensor) -> Tensor:
        """A canonical value as the stage would have been handed it: dtype, base of the gate, batch row."""
        if name == "cumsum":
            value = layouts.log_to_log2(value, torch.float32) if self.base2 else value.float()
        else:
            value = value.float() if name == "kkt" else value.to(self.k.dtype)
        return layouts.add_batch(value)

    def give(self, name: str, value: Tensor) -> Tensor:
        """A stage's value in the canonical layout."""
        if name == "final_state":
            return value
        value = layouts.drop_batch(value)
        return layouts.log2_to_log(value) if name == "cumsum" and self.base2 else value

    def run(self, name: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """One stage on values in fla's layout."""
        results = getattr(self, f"_{name}")(values)
        results = results if isinstance(results, tuple) else (results,)
        return {key: value for key, value in zip(OUTPUTS[name], results, strict=True) if value is not None}

    def _call(self, function_name: str, **arguments: Any) -> Any:
        """Call a stage function with what its signature knows of the arguments that all share."""
        function = self.package.stage(function_name)
        known = parameters(function)
        shared = {
            "cu_seqlens": self.cu_seqlens,
            "chunk_size": self.size,
            # 0.5.0 asks in which base the gate is; others know.
            "use_exp2": self.base2,
        }
        return function(**arguments, **{key: value for key, value in shared.items() if key in known})

    def _cumsum(self, values: dict[str, Tensor]) -> Any:
        scale = {}
        if self.base2:
            from importlib import import_module

            scale = {"scale": import_module("fla.ops.utils.constant").RCP_LN2}
        return self._call("chunk_local_cumsum", g=self.g, **scale)

    def _kkt(self, values: dict[str, Tensor]) -> Any:
        return self._call(
            "chunk_scaled_dot_kkt_fwd",
            k=self.k,
            g=values["cumsum"],
            beta=self.beta,
            output_dtype=torch.float32,
        )

    def _solve(self, values: dict[str, Tensor]) -> Any:
        if _fuses(self.package, self.size):
            _, _, inverse = self._call(
                "chunk_gated_delta_rule_fwd_intra", k=self.k, v=self.v, g=values["cumsum"], beta=self.beta
            )
            return inverse
        return self._call("solve_tril", A=values["kkt"], output_dtype=self.k.dtype)

    def _wu(self, values: dict[str, Tensor]) -> Any:
        return self._call(
            "recompute_w_u_fwd", k=self.k, v=self.v, beta=self.beta, A=values["solve"], g=values["cumsum"]
        )

    def _state(self, values: dict[str, Tensor]) -> Any:
        return self._call(
            "chunk_gated_delta_rule_fwd_h",
            k=self.k,
            w=values["w"],
            u=values["u"],
            g=values["cumsum"],
            initial_state=self.state,
            output_final_state=self.want_state,
        )

    def _output(self, values: dict[str, Tensor]) -> Any:
        return self._call(
            "chunk_fwd_o",
            q=self.q,
            k=self.k,
            v=values["v_new"],
            h=values["h"],
            g=values["cumsum"],
            scale=self.scale,
        ).to(self.q.dtype)
