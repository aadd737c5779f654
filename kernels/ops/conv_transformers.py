"""transformers' torch convolution: `transformers.conv` and `transformers.conv-update`.

The idea: as for the rule, the model's own torch functions are run, with the wrapper that would put
causal-conv1d's kernels in their place taken off. The layer hands the past over through its cache, which
keeps W inputs per channel and not W-1; its class does that here too, so that the state left behind is its
work. It knows no packed sequences and no slots: one call per sequence.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...capture.errors import CannotRun
from ..interface import KernelCall
from ..transformers import torch_function
from .conv_call import ConvAdapter, optional
from .conv_pool import ConvPool

CACHE = ("transformers.cache_utils", "LinearAttentionLayer")


@contextmanager
def without_tf32() -> Iterator[None]:
    """No tf32 in cuDNN, which torch allows it by default for float32 convolutions (seen on an H200).

    That is the library's choice and not the model's code: it is switched off here, and named as evidence.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


class TransformersConv(ConvAdapter):
    """What both functions share."""

    family = "transformers"
    package = "transformers"
    widths = ()
    separate_slots = True  # rows are gathered and put back: any slot will do
    function_name: str

    def __init__(self, version: str | None = None) -> None:
        """Import the model's function. Raises CannotRun where this version has none, or is another."""
        import transformers

        found: str = transformers.__version__
        if version is not None and found != version:
            raise CannotRun(f"transformers {version} was asked for but sys.path leads to {found}")
        super().__init__(found)
        self.function, self.found_in, self.unwrapped = torch_function(self.function_name)

    def facts(self) -> dict[str, Any]:
        name = f"{self.found_in}.{self.function_name}"
        return {"backend": "torch", "interpreted": False, "function": name, "unwrapped": self.unwrapped}

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        """One call per sequence. Raises Refused for what the function does not take."""
        self.check(call)
        tensors = call.tensors
        # The cache's width: its oldest column lies outside the window.
        width = tensors["conv_weight"].shape[1]
        pool = ConvPool(tensors, columns=width, channels_last=False, dtype=tensors["conv_input"].dtype)
        states, outputs = pool.gathered(), [tensors["conv_input"][:0]]
        weight, bias = tensors["conv_weight"].contiguous(), optional(call, "conv_bias")
        self.evidence |= {"calls": 0, "packing": "one call per sequence", "cudnn_tf32": False}
        with without_tf32():
            self._sequences(tensors, pool, states, outputs, weight, bias)
        pool.scatter(states)
        return {"conv_output": torch.cat(outputs), **pool.outputs()}

    def _sequences(
        self, tensors: dict[str, Tensor], pool: ConvPool, states: Tensor, outputs: list[Tensor],
        weight: Tensor, bias: Tensor | None,
    ) -> None:  # fmt: skip
        """Run each sequence by itself; `states` [N, D, W] and `outputs` take what comes back."""
        for n, (start, end) in enumerate(itertools.pairwise(tensors["cu_seqlens"].tolist())):
            if start == end:
                continue  # it is never called without a token
            x = tensors["conv_input"][start:end].T[None]
            output, states[n] = self.one(x, states[n : n + 1].clone(), bool(pool.fresh[n]), weight, bias)
            outputs.append(output[0].T)
            self.evidence["calls"] += 1

    def one(
        self, x: Tensor, state: Tensor, fresh: bool, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x [1, D, T], state [1, D, W] -> output [1, D, T], state [1, D, W]."""
        raise AssertionError("each function has its own")


class Prefill(TransformersConv):
    """`causal_conv1d_fn` behind the cache's `update_conv_state`."""

    op = "conv"
    function_name = "causal_conv1d_fn"

    def __init__(self, version: str | None = None) -> None:
        super().__init__(version)
        try:
            self.cache_class: Any = getattr(importlib.import_module(CACHE[0]), CACHE[1])
        except (ImportError, AttributeError) as error:
            raise CannotRun(f"transformers {self.version} has no {'.'.join(CACHE)} ({error})") from error
        if "conv_kernel_size" not in inspect.signature(self.cache_class.update_conv_state).parameters:
            raise CannotRun(
                f"transformers {self.version}: its {CACHE[1]} keeps the convolution's state in a way that is "
                "not known here; 5.17 and 5.24 were read"
            )

    def one(
        self, x: Tensor, state: Tensor, fresh: bool, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        width, n_tokens = weight.shape[1], x.shape[2]
        cache = self.cache_class()
        if not fresh:
            cache.lazy_initialization(conv_states=state, conv_kernel_size=width)
            cache.conv_states[0].copy_(state)
            cache.has_previous_state[0] = True
        whole = cache.update_conv_state(x, conv_kernel_size=width)
        output = self.function(whole, weight, bias, activation="silu")
        return output[:, :, -n_tokens:], cache.conv_states[0][0]


class Update(TransformersConv):
    """`causal_conv1d_update`, which rolls the state in place; the layer calls it for one token."""

    op = "conv-update"
    function_name = "causal_conv1d_update"

    def one(
        self, x: Tensor, state: Tensor, fresh: bool, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return self.function(x, state, weight, bias, "silu"), state[0]


KERNELS = {"conv": Prefill, "conv-update": Update}
