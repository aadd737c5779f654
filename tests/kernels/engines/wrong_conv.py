"""Convolution adapters with one conversion done wrong, chosen per call by `extra["wrong"]`.

Loaded by workers only, as wrong_adapters. Each is a mistake that a reader of a kernel's source could make.
"""

from __future__ import annotations

from importlib import import_module

import msgspec
import torch
import torch.nn.functional as F


def state_not_transposed(pool, kernel):
    """The pool's bytes read as [rows, L, D] where the kernel has [rows, D, L], or the other way round."""
    as_it_lies = pool.transpose(1, 2).contiguous().flatten()
    pool.copy_(as_it_lies.view(pool.shape).clone())


def oldest_input_last(pool, kernel):
    pool.copy_(pool.flip(2))


def one_column_late(pool, kernel):
    pool.copy_(pool.roll(1, dims=2))


ON_THE_POOL = {f.__name__: f for f in (state_not_transposed, oldest_input_last, one_column_late)}


def with_mistakes(module_name: str, op: str) -> type:
    """The family's adapter class, able to make each mistake."""
    module = import_module(f"gdncheck.kernels.ops.{module_name}")
    right, stock_pool = module.KERNELS[op], module.ConvPool

    class Wrong(right):
        def run(self, call):
            name = call.options.extra.get("wrong")
            options = msgspec.structs.replace(call.options, extra={})
            tensors = dict(call.tensors)
            if name == "window_shifted":
                weight = tensors["conv_weight"]
                tensors["conv_weight"] = torch.cat([weight[:, 1:], torch.zeros_like(weight[:, :1])], dim=1)
            if name in ON_THE_POOL:
                module.ConvPool = lambda *a, **k: self.mistaken(name, stock_pool(*a, **k))
            try:
                outputs = super().run(msgspec.structs.replace(call, tensors=tensors, options=options))
            finally:
                module.ConvPool = stock_pool
            if name == "silu_twice":
                outputs["conv_output"] = F.silu(outputs["conv_output"].float()).to(
                    tensors["conv_input"].dtype
                )
            return outputs

        def mistaken(self, name, pool):
            ON_THE_POOL[name](pool.pool, right)
            return pool

    return Wrong


class Table(dict):
    """`conv_vllm.conv` -> the class, made when it is asked for."""

    def __contains__(self, key):
        return True

    def __missing__(self, key):
        module, _, op = key.partition(".")
        return with_mistakes(module, op)


KERNELS = Table()
