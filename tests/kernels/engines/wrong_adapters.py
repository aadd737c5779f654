"""Adapters with one conversion done wrong, chosen per call by `extra["wrong"]`.

Loaded by workers only (KernelSpec.module names this file's module). Each mistake is one that a reader of
a kernel's source could make: they must show in what the adapter's tests look at.
"""

from __future__ import annotations

from importlib import import_module

import msgspec
import torch
from gdncheck.kernels import layouts


def transposed_state(tensors, wrong_slots):
    return tensors


def linear_gate(tensors, wrong_slots):
    return {**tensors, "g": -tensors["g"].exp()}


def tiled_heads(tensors, wrong_slots):
    """Value head h reads key head h mod HK instead of h // (HV / HK)."""
    times = tensors["v"].shape[1] // tensors["q"].shape[1]
    return {**tensors, "q": tensors["q"].repeat(1, times, 1), "k": tensors["k"].repeat(1, times, 1)}


def other_eps(tensors, wrong_slots):
    """l2norm with eps 1e-2 on rows whose norm is of that order."""
    return {**tensors, **{name: layouts.l2norm_rounded(tensors[name], 1e-2) for name in ("q", "k")}}


MISTAKES = {m.__name__: m for m in (transposed_state, linear_gate, tiled_heads, other_eps)}


def with_mistakes(family: str, op: str) -> type:
    """The family's adapter class, able to make each mistake."""
    module = import_module(f"gdncheck.kernels.{family}")
    right = module.KERNELS[op]
    slot_view = getattr(module, "SlotView", None)

    class Wrong(right):
        def run(self, call):
            name = call.options.extra.get("wrong")
            if name is None:
                return super().run(call)
            options = call.options
            if name == "other_eps":
                options = msgspec.structs.replace(options, qk="normalised")
            tensors = MISTAKES[name](dict(call.tensors), slot_view)
            if name == "transposed_state" and slot_view is None:
                return self.run_transposed(call, tensors)
            if name == "transposed_state":
                module.SlotView = lambda t, *, layout, **more: slot_view(
                    t, layout="KV" if layout == "VK" else "VK", **more
                )
            try:
                return super().run(msgspec.structs.replace(call, tensors=tensors, options=options))
            finally:
                if slot_view is not None:
                    module.SlotView = slot_view

        def run_transposed(self, call, tensors):
            """States handed over and taken back as [V, K], by an adapter that is given them gathered."""
            tensors["initial_state"] = tensors["initial_state"].transpose(-1, -2).contiguous()
            outputs = super().run(msgspec.structs.replace(call, tensors=tensors))
            return {**outputs, "final_state": outputs["final_state"].transpose(-1, -2).contiguous()}

    return Wrong


class Lazy(dict):
    """KERNELS whose classes are made when asked for: a worker loads one family."""

    def __contains__(self, name):
        return True

    def __getitem__(self, name):
        return with_mistakes(*name.split("."))


KERNELS = Lazy()
assert torch.__version__
