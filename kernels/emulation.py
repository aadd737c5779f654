"""Adapters for our own emulation: `emulation.chunk` and `emulation.recurrent`.

The idea: the emulation is a kernel like any other, so that sweeps over its rounding, chunk size and
summation order go through the same worker and verdict. Its precision is an option of the call, in
`RunOptions.extra`:

- `profile`: a name of `reference.precision.PROFILES`;
- `casts`: {cast point: format}, on top of the profile;
- `mode`: nearest-even, toward-zero, nearest-away or stochastic;
- `seed`: of stochastic rounding and of the variant;
- `variant`: number of an honest variant, 1 to 8;
- `stages`: give every stage's value beside the result; `stage`: run one stage on given values
  (`emulation_stages`).

Leaves to others: the algorithm (`reference.emulation`), its contract (`contracts_fla`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor

from ..capture.errors import Refused
from ..reference.emulation import EmulationResult, emulate_chunk
from ..reference.emulation_recurrent import emulate_recurrent
from ..reference.precision import PROFILES, Precision, precision_for
from ..reference.rounding import MODES, format_of
from ..reference.variants import Variant, honest_variants
from . import emulation_stages, layouts
from .contract import Capabilities, Contract
from .contracts_fla import emulation_contract
from .interface import KernelCall, KernelInfo, RunOptions

EXTRA = ("profile", "casts", "mode", "seed", "variant", "stages", "stage")
VARIANTS = 8


class EmulationKernel:
    """What both operations share."""

    op: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    package: ClassVar[str | None] = None
    default_profile: ClassVar[str]

    def __init__(self, version: str | None = None) -> None:
        """version: taken because every adapter takes one; there is one emulation."""
        self.version = version
        self.evidence: dict[str, Any] = {}

    @classmethod
    def contract_for(cls, version: str | None = None) -> Contract:
        return emulation_contract(cls.op, cls.default_profile)

    def describe(self) -> KernelInfo:
        contract = self.contract_for(self.version)
        return KernelInfo(
            name=f"emulation.{self.op}",
            version=self.version,
            capabilities=msgspec.structs.replace(self.capabilities, clauses=contract.clauses),
            contract=contract,
            environment={"torch": str(torch.__version__), "interpreted": False},
        )

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """`output` [T, HV, V] in v's dtype and `final_state` [N, HV, K, V] in the state's.

        Raises Refused for an option that the emulation does not have, with its value.
        """
        t, options = call.tensors, call.options
        if t["g"].dim() == 3:
            raise Refused("g is per key channel [T, HV, K]; the emulation takes one decay per head [T, HV]")
        precision = self._precision(options, t["v"].device.type)
        state_dtype = options.state_dtype
        if state_dtype is not None:
            if state_dtype not in self.capabilities.state_dtypes:
                raise Refused(
                    f"state dtype {state_dtype} is none of {', '.join(self.capabilities.state_dtypes)}"
                )
            kept = format_of(layouts.DTYPES[state_dtype])
            precision = precision.with_casts(handover=kept, final_state=kept)
        q, k = t["q"], t["k"]
        before = options.qk == "raw" and options.l2norm == "before"
        if before:
            q, k = layouts.l2norm_rounded(q), layouts.l2norm_rounded(k)
        seed = int(options.extra.get("seed", 0))
        generator = torch.Generator(device=q.device).manual_seed(seed)
        self.evidence = {"backend": "torch", "precision": precision.name, "mode": precision.mode}
        result = self._emulate(
            call, q=q, k=k, precision=precision, generator=generator, variant=self._variant(options, seed),
            l2norm=options.qk == "raw" and not before,
        )  # fmt: skip
        if call.options.extra.get("stage") is not None:
            return emulation_stages.outputs_of(call, precision, result)
        outputs = {"output": result.output.to(t["v"].dtype)}
        if options.output_final_state:
            dtype = torch.float32 if state_dtype is None else layouts.DTYPES[state_dtype]
            outputs["final_state"] = result.final_state.to(dtype)
        if call.options.extra.get("stages"):
            outputs = {**emulation_stages.values_of(call, precision, result), **outputs}
        return outputs

    def _precision(self, options: RunOptions, device: str) -> Precision:
        unknown = sorted(set(options.extra) - set(EXTRA))
        if unknown:
            raise Refused(f"the emulation has no option {unknown[0]!r}; known: {', '.join(EXTRA)}")
        profile = options.extra.get("profile", self.default_profile)
        mode = options.extra.get("mode")
        if profile not in PROFILES:
            raise Refused(f"unknown precision profile {profile!r}; known: {', '.join(PROFILES)}")
        if mode is not None and mode not in MODES:
            raise Refused(f"unknown rounding mode {mode!r}; known: {', '.join(MODES)}")
        precision = precision_for(profile, device=device, chunk_size=options.chunk_size)
        try:
            precision = precision.with_casts(**dict(options.extra.get("casts", {})))
        except ValueError as error:
            raise Refused(str(error)) from None
        return precision if mode is None else dataclasses.replace(precision, mode=mode)

    def _variant(self, options: RunOptions, seed: int) -> Variant | None:
        number = options.extra.get("variant")
        if number is None:
            return None
        if not 1 <= int(number) <= VARIANTS:
            raise Refused(f"variant {number} does not exist; the honest variants are 1 to {VARIANTS}")
        return honest_variants(VARIANTS, seed)[int(number) - 1]

    def _emulate(self, call: KernelCall, **arguments: Any) -> EmulationResult:
        raise AssertionError("each operation has its own")


def _shared(call: KernelCall) -> dict[str, Any]:
    """The arguments that both operations take from the call as they are."""
    t = call.tensors
    return {
        "v": t["v"], "g": t["g"].float(), "beta": t["beta"], "cu_seqlens": t["cu_seqlens"],
        "initial_state": layouts.gathered_state(t), "scale": call.options.scale,
    }  # fmt: skip


class EmulationChunk(EmulationKernel):
    """`emulation.chunk`."""

    op = "chunk"
    default_profile = "generic"
    capabilities = Capabilities(
        chunk_sizes=(16, 32, 64, 128),
        l2norm="both",
        state_dtypes=("float32", "bfloat16", "float16"),
        stages=("cumsum", "kkt", "solve", "wu", "state", "output"),
        profile="generic",
    )

    def _emulate(self, call: KernelCall, **arguments: Any) -> EmulationResult:
        size = call.options.chunk_size or 64
        if size not in self.capabilities.chunk_sizes:
            known = ", ".join(map(str, self.capabilities.chunk_sizes))
            raise Refused(f"chunk size {size} is none of {known}")
        stages = emulation_stages.arguments(call, arguments["precision"])
        return emulate_chunk(**_shared(call), **arguments, **stages, chunk_size=size)


class EmulationRecurrent(EmulationKernel):
    """`emulation.recurrent`."""

    op = "recurrent"
    default_profile = "fla-recurrent"
    capabilities = Capabilities(
        default_chunk_size=None,
        l2norm="both",
        state_dtypes=("float32", "bfloat16", "float16"),
        profile="fla-recurrent",
    )

    def _emulate(self, call: KernelCall, **arguments: Any) -> EmulationResult:
        if call.options.chunk_size is not None:
            raise Refused(f"chunk size {call.options.chunk_size}: a recurrent kernel has no chunks")
        if call.options.extra.get("stages") or call.options.extra.get("stage") is not None:
            raise Refused("emulation.recurrent has no stages; the chunk form has (emulation.chunk)")
        return emulate_recurrent(**_shared(call), **arguments)


KERNELS = {"chunk": EmulationChunk, "recurrent": EmulationRecurrent}
