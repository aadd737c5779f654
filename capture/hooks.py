"""Record what the Gated DeltaNet layers of a live transformers model hand to the rule, from outside.

The idea: nothing of transformers is edited. A forward hook marks which layer is running, hooks on its
projections copy the core's inputs, and the rule's function is wrapped where that release looks it up:
as an attribute of the layer (5.7: `self.chunk_gated_delta_rule`) or as a global of the modelling module
(5.24: `torch_chunk_gated_delta_rule`). Copies are taken before the rule runs, because a kernel may
write its state in place, and lie on the CPU in transformers' own layout [B, T, ...];
`huggingface.case_from_huggingface` makes the canonical case of them. Everything is taken off again at
the end, whatever happened.

A layer that ran without its rule being seen is an error here: a capture never misses a call silently.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import What
from .errors import BadInput, CannotRun

GDN_CLASSES = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
# Where a release of transformers looks the rule up: on the layer, or in the layer's module.
LAYER_ATTRIBUTES = ("chunk_gated_delta_rule", "recurrent_gated_delta_rule")
MODULE_GLOBALS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba")
# The rule's own words for what a case calls q, k, v, and the tensors that a case keeps of its arguments.
RULE_WORDS = {"query": "q", "key": "k", "value": "v"}
RULE_TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")


class StopCapture(Exception):
    """Ends a forward pass after the last layer asked for; `live` expects it, nobody else sees it."""


@dataclass
class LayerCall:
    """One call of one GDN layer: CPU copies in transformers' layout, B sequences of T tokens."""

    layer: int
    call: int
    """0-based number of the call of this layer."""
    module: nn.Module
    conv_state: Tensor | None = None
    """[B, D, W or W-1] before the call; None where the cache held none."""
    projections: dict[str, Tensor] = field(default_factory=dict)
    """Outputs of the input projections, [B, T, channels]."""
    rule: dict[str, Tensor | None] = field(default_factory=dict)
    """q, k [B, T, H, K], v [B, T, HV, V], g, beta [B, T, HV], initial_state, cu_seqlens as handed over."""
    l2norm_in_kernel: bool = False
    scale: float | None = None
    backend: str = ""
    """Dotted name of the function that really ran the rule."""
    output: Tensor | None = None
    """[B, T, HV, V]"""
    final_state: Tensor | None = None
    """[B, HV, K, V] as the rule returned it, before the cache stores it."""
    new_conv_state: Tensor | None = None
    core_output: Tensor | None = None
    """Output of the gated norm, rows of V values."""
    layer_output: Tensor | None = None
    """Output of the whole layer, [B, T, hidden]."""
    weights: dict[str, Tensor | None] = field(default_factory=dict)


Sink = Callable[[LayerCall], None]


def gdn_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Layer index -> Gated DeltaNet module, for the classes that capture knows."""
    found = {}
    for module in model.modules():
        if any(base.__name__ in GDN_CLASSES for base in type(module).__mro__):
            found[int(module.layer_idx)] = module  # type: ignore[arg-type]
    return found


@contextmanager
def recording(
    model: nn.Module, layers: list[int], sink: Sink, *, what: What = "core", stop_after: int | None = None
) -> Iterator[None]:
    """While open, every call of the named layers ends with `sink(LayerCall)`.

    what: `rule` leaves out projections, weights, conv states and outputs around the rule.
    stop_after: raise StopCapture when this layer is done.
    Raises CannotRun where a layer is no GDN layer that capture knows, or its rule is not to be found.
    """
    modules = gdn_layers(model)
    for layer in layers:
        if layer not in modules:
            raise CannotRun(f"layer {layer} of {type(model).__name__} is none of {', '.join(GDN_CLASSES)}")
    recorder = _Recorder(sink, what, stop_after)
    undo: list[Callable[[], Any]] = []
    try:
        for module in modules.values():
            undo += recorder.lend_conv_weight(module)
        for layer in layers:
            undo += recorder.watch(layer, modules[layer])
        for owner, name in _seams([modules[layer] for layer in layers]):
            original = getattr(owner, name)
            setattr(owner, name, recorder.wrap(original))
            undo.append(partial(setattr, owner, name, original))
        yield
    finally:
        for step in reversed(undo):
            step()


def _seams(modules: list[nn.Module]) -> list[tuple[Any, str]]:
    """(owner, attribute) of every place where these layers look their rule up."""
    seams: list[tuple[Any, str]] = []
    for module in modules:
        own = [(module, name) for name in LAYER_ATTRIBUTES if callable(vars(module).get(name))]
        source = sys.modules[_known_class(module).__module__]
        shared = [(source, name) for name in MODULE_GLOBALS if callable(vars(source).get(name))]
        # 5.7 has both; there the layer's attribute is what runs.
        found = own or shared
        if not found:
            raise CannotRun(
                f"{source.__name__}: no gated delta rule to wrap (neither {LAYER_ATTRIBUTES[0]} on the layer "
                f"nor {MODULE_GLOBALS[0]} in its module); use transformers 5.7 to 5.24"
            )
        seams += [seam for seam in found if seam not in seams]
    return seams


def _known_class(module: nn.Module) -> type:
    return next(base for base in type(module).__mro__ if base.__name__ in GDN_CLASSES)


class _Recorder:
    """The state that the hooks share: which captured layer is running, and what it has shown so far."""

    def __init__(self, sink: Sink, what: What, stop_after: int | None) -> None:
        self.sink, self.what, self.stop_after = sink, what, stop_after
        self.current: LayerCall | None = None
        self.counts: dict[int, int] = {}

    def watch(self, layer: int, module: nn.Module) -> list[Callable[[], Any]]:
        """Hook one layer; returns the steps that take the hooks off."""
        before = module.register_forward_pre_hook(
            lambda _, args, kwargs: self.begin(layer, module, args, kwargs), with_kwargs=True
        )
        after = module.register_forward_hook(
            lambda _, args, kwargs, output: self.end(args, kwargs, output), with_kwargs=True
        )
        handles = [before, after]
        if self.what == "core":
            children = dict(module.named_children())
            for name in PROJECTIONS:
                if name in children:
                    handles.append(children[name].register_forward_hook(self._keep_projection(name)))
            handles.append(children["norm"].register_forward_hook(self._keep_core_output))
        return [handle.remove for handle in handles]

    def begin(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.current = None
        mask = kwargs.get("attention_mask", args[2] if len(args) > 2 else None)
        if mask is not None and not bool(mask.bool().all()):
            raise BadInput(
                f"layer {layer}: this call is padded ({int((~mask.bool()).sum())} masked positions); a "
                "kernel would be judged on rows that mean nothing: run one unpadded sequence per call"
            )
        call = LayerCall(layer=layer, call=self.counts.get(layer, 0), module=module)
        call.conv_state = _cached_conv_state(_cache_of(args, kwargs), layer)
        self.counts[layer] = call.call + 1
        self.current = call

    def end(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call, self.current = self.current, None
        assert call is not None, "a layer ended that never began"
        if not call.rule:
            raise CannotRun(
                f"layer {call.layer} ran but its rule was not seen: {type(call.module).__name__} of this "
                "transformers calls it by another name; use transformers 5.7 to 5.24"
            )
        if self.what == "core":
            call.layer_output = _copy(output)
            call.new_conv_state = _cached_conv_state(_cache_of(args, kwargs), call.layer)
            call.weights = core_weights(call.module)
        self.sink(call)
        if call.layer == self.stop_after:
            raise StopCapture

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The rule's function, showing what it was handed and what it gave back; same result."""

        def rule(*args: Any, **kwargs: Any) -> Any:
            call = self.current
            if call is None:
                return original(*args, **kwargs)
            if call.rule:
                raise CannotRun(
                    f"layer {call.layer} called its rule twice in one pass; capture expects one call"
                )
            self._keep_rule(call, original, args, kwargs)
            result = original(*args, **kwargs)
            call.output, call.final_state = _copy(result[0]), _copy(result[1])
            return result

        return rule

    def lend_conv_weight(self, module: nn.Module) -> list[Callable[[], Any]]:
        """Under offload, load conv1d's weight for the whole layer where transformers does not.

        accelerate loads a module's weights only when that module's forward is called, but the layer hands
        `conv1d.weight` to a function. 5.24 loads it itself (`force_accelerate_hooks`); 5.7 does not.
        """
        loader = getattr(module.conv1d, "_hf_hook", None)
        if loader is None or hasattr(sys.modules[_known_class(module).__module__], "force_accelerate_hooks"):
            return []
        before = module.register_forward_pre_hook(lambda *_: _no_value(loader.pre_forward(module.conv1d)))
        after = module.register_forward_hook(lambda *_: _no_value(loader.post_forward(module.conv1d, None)))
        return [before.remove, after.remove]

    def _keep_rule(
        self, call: LayerCall, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        given = dict(zip(("q", "k", "v"), args, strict=False))
        for word, value in kwargs.items():
            given[RULE_WORDS.get(word, word)] = value
        missing = [name for name in ("q", "k", "v", "g", "beta") if given.get(name) is None]
        if missing or len(args) > 3:
            raise CannotRun(
                f"layer {call.layer}: the rule was called in an unknown way ({len(args)} positional "
                f"arguments, {', '.join(missing) or 'nothing'} missing); use transformers 5.7 to 5.24"
            )
        call.rule = {name: _copy(given.get(name)) for name in RULE_TENSORS}
        call.l2norm_in_kernel = bool(given.get("use_qk_l2norm_in_kernel", False))
        call.scale = given.get("scale")
        call.backend = implementation_name(original)

    def _keep_projection(self, name: str) -> Callable[..., None]:
        def keep(_module: nn.Module, _args: Any, output: Tensor) -> None:
            if self.current is not None:
                self.current.projections[name] = _copy(output)  # type: ignore[assignment]

        return keep

    def _keep_core_output(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        if self.current is not None:
            self.current.core_output = _copy(output)


def implementation_name(function: Any) -> str:
    """Dotted name of the function that does the work: 5.24 hides fla's or torch's behind one wrapper."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if "implementation" in names:
        function = function.__closure__[names.index("implementation")].cell_contents
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"


@contextmanager
def loaded(module: nn.Module) -> Iterator[None]:
    """The module's own parameters are real while this is open, also where accelerate keeps them elsewhere."""
    if getattr(module, "_hf_hook", None) is None:
        yield
        return
    from accelerate.utils import align_module_device

    with align_module_device(module):
        yield


def core_weights(module: Any) -> dict[str, Tensor | None]:
    """conv_weight [D, W], conv_bias [D], A_log, dt_bias [HV], norm_weight [V] as CPU copies."""
    weights: dict[str, Tensor | None] = {}
    with loaded(module):
        weights["A_log"], weights["dt_bias"] = _copy(module.A_log), _copy(module.dt_bias)
    with loaded(module.conv1d):
        weights["conv_weight"] = _copy(module.conv1d.weight.squeeze(1))
        weights["conv_bias"] = _copy(module.conv1d.bias)
    with loaded(module.norm):
        weights["norm_weight"] = _copy(module.norm.weight)
    return weights


def _cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cache handed to a layer: `cache` in 5.24, `cache_params` in 5.7."""
    for name in ("cache", "cache_params"):
        if name in kwargs:
            return kwargs[name]
    return args[1] if len(args) > 1 else None


def _cached_conv_state(cache: Any, layer: int) -> Tensor | None:
    """Copy of the layer's conv state, or None where nothing was cached yet.

    5.7 keeps one tensor per layer, 5.24 a dictionary of them (a layer may have several; GDN has one).
    """
    if cache is None:
        return None
    slot = cache.layers[layer]
    state, filled = slot.conv_states, slot.has_previous_state
    if isinstance(state, dict):
        state, filled = state[0], filled[0]
    return _copy(state) if filled else None


def _copy(tensor: Tensor | None) -> Tensor | None:
    """A contiguous CPU copy that nothing writes into any more."""
    if tensor is None:
        return None
    if tensor.device.type == "meta":
        raise CannotRun("a weight is offloaded and cannot be read here; run without --device-map")
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _no_value(_: Any) -> None:
    """A hook that returns something replaces the arguments or the output; this one must not."""
