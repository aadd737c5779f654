"""Honest kernels in this process: sound ways to compute the rule, each a runner as `compare.session` sees it.

The idea: a sound kernel differs from the yardstick in its chunk size, inverse, summation order, rounding
table or last float32 bit, and in nothing else; each of these is a row of a roster. Half declare nothing
(judged by the generic yardstick), half declare the profile whose casts they have. Never stochastic rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from gdncheck.kernels.callable import CallableAdapter, read_capabilities
from gdncheck.kernels.interface import KernelCall, KernelInfo, RunResult
from gdncheck.reference.emulation import emulate_chunk
from gdncheck.reference.emulation_recurrent import emulate_recurrent
from gdncheck.reference.precision import Precision, precision_for
from gdncheck.reference.variants import Variant, honest_variants
from torch import Tensor

# The yardstick's own variants have seeds below this; those of the kernels are other draws.
FIRST_SEED = 1000
RESET_LOG_DECAY = -200.0
# Profiles of kernels that may well be handed in without a declaration.
UNDECLARED = ("fla-0.4", "fla-0.6", "generic", "vllm-0.19", "sglang-0.5", "hf-torch", "vllm-cpu")
DECLARED = ("fla-0.4", "fla-0.6", "fla-0.6-small", "hf-torch", "generic", "vllm-0.19", "sglang-0.5",
            "vllm-cpu", "flashinfer-0.6", "fla-recurrent")  # fmt: skip
# Where powers of A pass 1e17 although the inverse is within 1: doubling is no sound way there.
NO_DOUBLING = ("parallel-keys", "identical-keys")
# flashinfer takes bf16 and fp16 only; the rest take what comes.
NARROW_ONLY = ("flashinfer-0.6", "vllm-cpu")


@dataclass(frozen=True)
class Honest:
    """One sound kernel."""

    name: str
    precision: Precision
    chunk_size: int | None
    """None: the recurrence."""
    variant: Variant | None = None
    declares: str | None = None
    """Profile that it declares; None: nothing."""
    narrow_state: bool = False
    """Returns the final state in the dtype that the initial state came in."""


def roster(number: int, seed: int, *, family: str, dtype: torch.dtype, device: str = "cpu") -> list[Honest]:
    """Fourteen kernels for case `number`: eight that declare nothing and six of one declared profile."""
    dice = random.Random(f"kernels {seed} {number}")
    variants = honest_variants(8, FIRST_SEED + number)
    dice.shuffle(variants)
    variants += honest_variants(4, FIRST_SEED + number + 1)
    table = {name: precision_for(name, device=device) for name in (*DECLARED, "generic-doubling")}
    fla, generic = table["fla-0.4"], table["generic"]
    other = dice.choice([n for n in UNDECLARED if not _too_narrow(n, dtype)])
    kernels = [
        Honest("chunk 16", fla, 16, variants[0]),
        Honest("chunk 32, substitution", replace(generic, solve="substitution"), 32, variants[1]),
        Honest("chunk 128", fla, 128, variants[2]),
        _fourth(family, dtype, fla, variants[3]),
        Honest("recurrence", table["fla-recurrent"], None),
        Honest(f"undeclared {other}, {variants[4].name}", table[other], 64, variants[4]),
        Honest(f"generic, {variants[5].name}", generic, 64, variants[5]),
        Honest("float64 arithmetic, narrow state", _exact_but_stored(generic), 64, narrow_state=True),
    ]
    known = [n for n in DECLARED if not _too_narrow(n, dtype)]
    if family not in NO_DOUBLING:
        known.append("generic-doubling")
    profile = dice.choice(known)
    size = None if profile == "fla-recurrent" else 32 if profile == "fla-0.6-small" else 64
    for variant in variants[6:]:
        name = f"declared {profile}, {variant.name}"
        kernels.append(Honest(name, table[profile], size, variant, declares=profile))
    return kernels


def _fourth(family: str, dtype: torch.dtype, fla: Precision, variant: Variant) -> Honest:
    """An inverse by doubling where bf16 hides the digits it loses, else triangular solves."""
    if family in NO_DOUBLING or dtype != torch.bfloat16:
        return Honest("chunk 64, no inverse", replace(fla, solve="direct"), 64, variant)
    return Honest("chunk 64, doubling", replace(fla, solve="doubling"), 64, variant)


def _too_narrow(profile: str, dtype: torch.dtype) -> bool:
    return profile in NARROW_ONLY and dtype == torch.float32


def _exact_but_stored(generic: Precision) -> Precision:
    """Float64 everywhere, rounded once at the end: the most exact kernel there can be."""
    return replace(generic, name="stored", casts={"output": "native"}, dots={}, arithmetic="fp64")


class InProcess:
    """A runner without a worker."""

    def __init__(self, kernel: Honest, device: str = "cpu") -> None:
        declared = {"default_chunk_size": kernel.chunk_size, "profile": kernel.declares}
        if kernel.declares is None:
            declared = {}
        self.device = device
        function = rule_of(kernel)
        self.adapter = CallableAdapter(kernel.name, function, read_capabilities(declared, kernel.name))

    @property
    def info(self) -> KernelInfo:
        return self.adapter.describe()

    def run(self, calls: list[KernelCall]) -> list[RunResult]:
        return [self._one(call) for call in calls]

    def _one(self, call: KernelCall) -> RunResult:
        tensors = {name: tensor.to(self.device) for name, tensor in call.tensors.items()}
        try:
            outputs = self.adapter.run(KernelCall(tensors=tensors, options=call.options))
        except ValueError as error:
            # As a worker reports it: the emulation refuses what some relations try (rows that nobody owns).
            return RunResult(status="error", message=f"ValueError: {error}")
        return RunResult(status="ok", outputs=outputs, seconds=0.0)


def rule_of(kernel: Honest) -> Callable[..., tuple[Tensor, Tensor]]:
    """The kernel with the signature of a kernel by import path."""

    def rule(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):  # type: ignore[no-untyped-def]
        shared = {
            "precision": kernel.precision, "scale": scale, "initial_state": initial_state,
            "cu_seqlens": cu_seqlens, "variant": kernel.variant,
        }  # fmt: skip
        if kernel.chunk_size is None:
            result = emulate_recurrent(q, k, v, g, beta, **shared)
        else:
            # A chunk kernel that takes -inf at all takes it as a decay to zero.
            g = torch.where(g == -torch.inf, RESET_LOG_DECAY, g)
            result = emulate_chunk(q, k, v, g, beta, chunk_size=kernel.chunk_size, **shared)
        narrow = kernel.narrow_state and initial_state is not None
        kept = initial_state.dtype if narrow else torch.float32
        return result.output.to(v.dtype), result.final_state.to(kept)

    return rule
