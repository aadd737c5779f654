"""What passes between a verdict and a kernel: a call, its options, its result, and an adapter's shape.

The idea: both sides of the worker's pipe speak in these frozen values only, in the canonical layout.
An adapter converts from it and back, and runs only inside a worker.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec
from torch import Tensor

from .contract import Capabilities, Contract


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to run one call. None everywhere means: as the kernel does by itself."""

    scale: float | None = None
    qk: Literal["raw", "normalised"] = "normalised"
    """Whether the tensors q and k of this call still need l2norm."""
    l2norm: Literal["in_kernel", "before"] | None = None
    """For raw q, k: normalise inside the kernel or before it (rounded to the dtype); None: as production."""
    chunk_size: int | None = None
    state_dtype: str | None = None
    output_final_state: bool = True
    stepwise: bool = False
    """Run the call token by token (`stepwise`), the state handed on in `state_dtype`."""
    keep_states: tuple[int, ...] = ()
    """Of a stepwise call: numbers of tokens after which the states come back, as `step_states`."""
    pins: dict[str, Any] = {}
    """Triton kernel name -> pinned autotune configuration; `*` for all that have none of their own."""
    tune: Literal["stock", "never", "fresh"] = "stock"
    """How kernels without a pin choose: as their tuner does; the first configuration that the device can
    hold, nothing timed; or tuned again now, whatever was tuned before."""
    distinct: bool = False
    """Within a batch, send outputs with the bits of an earlier call's once only (they come back shared)."""
    busy: bool = False
    """Keep a second stream of the GPU busy meanwhile; evidence `busy_stream` counts its launches."""
    poison: Literal["nan", "huge"] | None = None
    """Fill fresh allocations of the worker with this before the kernel sees them."""
    shared: Literal["nan", "huge"] | None = None
    """On a GPU, fill all shared memory with this before every Triton launch; evidence `shared_memory`."""
    guard: bool = False
    """Put inputs and fresh allocations between guard bands; evidence `guard_written` lists those hit."""
    heads: tuple[int, int, int, int] | None = None
    """(HK, K, HV, V), for an operation that splits the convolution's channels into heads."""
    eps: float | None = None
    """Of an l2norm or a gated RMSNorm; None: 1e-6."""
    extra: dict[str, Any] = {}
    """Further keywords that an adapter or a kernel by import path names."""


class KernelCall(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One call: canonical tensors (q, k, v, g, beta, cu_seqlens, initial_state?, ...) and options."""

    tensors: dict[str, Tensor]
    options: RunOptions = RunOptions()


class RunResult(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What came back: the outputs, or why there are none."""

    status: Literal["ok", "error", "timeout", "crash", "refused"]
    """`refused`: the adapter declined the call before running (outside its capabilities)."""
    outputs: dict[str, Tensor] = {}
    """`output` [T, HV, V], `final_state` [N, HV, K, V]; further names by op (stages, pool)."""
    seconds: float | None = None
    """Time of the kernel alone (device-synchronised)."""
    message: str | None = None
    """One line: exception and place, the signal's name, the limit that was hit."""
    evidence: dict[str, Any] = {}
    """Proof of what was exercised: launched configurations, poisoned bytes, backend, warnings."""


class KernelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who a kernel is, as its worker found it."""

    name: str
    """Canonical name with version, e.g. `fla.chunk@0.4.0`."""
    version: str | None = None
    capabilities: Capabilities = Capabilities()
    contract: Contract
    environment: dict[str, Any] = {}
    """Versions of torch, triton, the package; device; whether Triton is interpreted."""


class Adapter(Protocol):
    """A kernel as a worker sees it; one instance per worker and kernel."""

    def describe(self) -> KernelInfo:
        """Who this is. May import the kernel's package."""

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """Run one call on tensors already on the device; canonical layout in and out.

        Raises Refused (kernels.errors) for a call outside the capabilities; any other exception is
        the kernel's own error.
        """
