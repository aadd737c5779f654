"""flash-linear-attention's Triton convolution: `fla.conv` (`causal_conv1d`) and `fla.conv-update`.

The idea: the Triton backend is asked for by name, with the state as fla keeps it: [N, D, W], W columns of
which the first lies outside the window, in the input's dtype. fla knows no slots; rows are gathered from the
pool and put back as an engine would. Versions keep the file in two places (0.4.0, 0.6.0).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...capture.errors import CannotRun
from .. import autotune
from ..fla_package import TRITON_ONLY, load
from ..interface import KernelCall
from ..layouts import add_batch, drop_batch, own_offsets
from .conv_call import CONV, ConvAdapter, optional, tokens_each
from .conv_pool import ConvPool

MODULES = ("fla.modules.causal_conv1d.ops", "fla.modules.convolution")


class FlaConv(ConvAdapter):
    """What both functions share."""

    family = "fla"
    package = "fla-core"
    capabilities = msgspec.structs.replace(CONV, max_tokens_cpu=2048, pins=("causal_conv1d_fwd_kernel",))
    environment = TRITON_ONLY
    widths = ()
    separate_slots = True  # rows are gathered and put back: any slot will do

    def __init__(self, version: str | None = None) -> None:
        """Import one version. Raises CannotRun where fla or its convolution cannot be imported."""
        self.package_module = load(version)
        super().__init__(self.package_module.version)
        self.module = _convolution(self.version)

    def facts(self) -> dict[str, Any]:
        return {"backend": "triton", "module": self.module.__name__, **self.package_module.environment()}

    def state(self, pool: ConvPool) -> Tensor:
        """[N, D, W], contiguous."""
        return pool.gathered()

    def pool_of(self, call: KernelCall) -> ConvPool:
        """The call's state with the column that fla keeps besides."""
        width = call.tensors["conv_weight"].shape[1]
        return ConvPool(call.tensors, columns=width, channels_last=False)

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        """One call. Raises Refused for what the kernel does not take."""
        self.check(call)
        with self._multiprocessors(call), autotune.pinned(call.options.pins) as launched:
            outputs = self.call_kernel(call)
        self.evidence["launched"] = dict(launched)
        return outputs

    def call_kernel(self, call: KernelCall) -> dict[str, Tensor]:
        raise AssertionError("each function has its own")

    @contextmanager
    def _multiprocessors(self, call: KernelCall) -> Iterator[None]:
        """Where Triton is interpreted there is no GPU to count, and 0.4.0 cuts its blocks of tokens by it."""
        if not self.package_module.interpreted or not hasattr(self.module, "get_multiprocessor_count"):
            yield
            return
        stock = self.module.get_multiprocessor_count
        count = int(call.options.extra.get("multiprocessors", 1))
        self.evidence["multiprocessors"] = count
        self.module.get_multiprocessor_count = lambda *_: count
        try:
            yield
        finally:
            self.module.get_multiprocessor_count = stock


class Prefill(FlaConv):
    """`causal_conv1d`: packed sequences."""

    op = "conv"

    def call_kernel(self, call: KernelCall) -> dict[str, Tensor]:
        if not self.package_module.counts_empty:
            self.check_no_empty(call, "this version numbers the sequences of its chunks without empty ones")
        tensors, pool = call.tensors, self.pool_of(call)
        stateless = pool.starts_from_zeros and not call.options.extra.get("zero_state")
        output, final = self.module.causal_conv1d(
            x=add_batch(tensors["conv_input"]),
            weight=tensors["conv_weight"].contiguous(),
            bias=optional(call, "conv_bias"),
            initial_state=None if stateless else self.state(pool),
            output_final_state=True,
            activation="silu",
            backend="triton",
            cu_seqlens=own_offsets(tensors["cu_seqlens"]),
        )
        pool.scatter(final)
        return {"conv_output": drop_batch(output), **pool.outputs()}


class Update(FlaConv):
    """`causal_conv1d_update`: one token of each sequence; more are as many steps."""

    op = "conv-update"

    def call_kernel(self, call: KernelCall) -> dict[str, Tensor]:
        tensors, pool = call.tensors, self.pool_of(call)
        n_tokens = tokens_each(call, "fla.conv-update")
        x = tensors["conv_input"].view(pool.n_sequences, n_tokens, -1)
        cache, outputs = self.state(pool), []
        for step in range(n_tokens):
            output, cache = self.module.causal_conv1d_update(
                x=x[:, step].contiguous(),
                cache=cache,
                weight=tensors["conv_weight"].contiguous(),
                bias=optional(call, "conv_bias"),
                activation="silu",
            )
            outputs.append(output)
        pool.scatter(cache)
        return {"conv_output": torch.stack(outputs, dim=1).flatten(0, 1), **pool.outputs()}


def _convolution(version: str | None) -> Any:
    """The module that holds the convolution. Raises CannotRun where this version has none."""
    for name in MODULES:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise CannotRun(f"fla-core {version}: its convolution needs {error.name}") from error
    raise CannotRun(f"fla-core {version} has no {' or '.join(MODULES)}")


KERNELS = {"conv": Prefill, "conv-update": Update}
