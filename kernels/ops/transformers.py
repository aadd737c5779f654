"""transformers' operations around the rule: `transformers.core`, `.gate`, `.l2norm`, `.norm`.

The idea: the layer's own forward is run, and nothing is written anew: an instance of the model's class whose
input projections hand over the case's tensors and whose output projection is left out. On the way its rule
and its convolution are its torch functions, wrapped so that what they were handed is seen. It knows no packed
sequences: one call per sequence, with the model's own cache. The gate is two lines inside that forward, so
`transformers.gate` is what a forward hands to its rule.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor, nn

from ...capture.errors import CannotRun, Refused
from ..contract import Contract
from ..interface import KernelCall
from ..layouts import gathered_state
from ..transformers import torch_function
from .adapter import PLAIN, OpAdapter
from .contracts import contract_of_op
from .conv_state import starting_conv_state

LAYER, CACHE = "GatedDeltaNet", "transformers.cache_utils"
RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
CONVS = ("causal_conv1d_fn", "causal_conv1d_update")


class _Given(nn.Module):
    """An input projection that hands over what it was given, whatever the hidden states are."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Tensor | None = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        assert self.value is not None
        return self.value


class _TransformersOp(OpAdapter):
    family: ClassVar[str] = "transformers"
    package: ClassVar[str | None] = "transformers"
    capabilities = PLAIN

    def __init__(self, version: str | None = None) -> None:
        """Import the model. Raises CannotRun where the installed version is another or has no such layer."""
        import transformers

        found: str = transformers.__version__
        if version is not None and found != version:
            raise CannotRun(f"transformers {version} was asked for but sys.path leads to {found}")
        super().__init__(found)
        _, name, _ = torch_function(RULES[0])
        self.module = sys.modules[name]

    @classmethod
    def contract_for(cls, version: str | None) -> Contract:
        return contract_of_op("transformers", cls.op, version)

    def facts(self) -> dict[str, Any]:
        return {"backend": "torch", "interpreted": False, "module": self.module.__name__}

    def own_class(self, suffix: str) -> Any:
        """The model's class of that kind. Raises CannotRun where its module has none."""
        found = [
            value
            for name, value in vars(self.module).items()
            if name.endswith(suffix) and isinstance(value, type)
        ]
        if not found:
            raise CannotRun(f"{self.module.__name__} has no class ...{suffix}")
        return found[0]


class L2Norm(_TransformersOp):
    """`l2norm` on q and k in float32, which is how the rule's function calls it; stays float32."""

    op, read = "l2norm", "q"

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        return {name: self.module.l2norm(call.tensors[name].float(), dim=-1, eps=1e-6) for name in ("q", "k")}


class Norm(_TransformersOp):
    """The layer's gated RMSNorm, its class's own forward."""

    op, read = "norm", "core_output"

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        t = call.tensors
        norm = self.own_class("RMSNormGated")(t["norm_weight"].shape[0], eps=call.options.eps or 1e-6)
        norm.weight = nn.Parameter(t["norm_weight"], requires_grad=False)
        size = t["z"].shape[-1]
        normed = norm(t["core_output"].reshape(-1, size), t["z"].reshape(-1, size))
        return {"normed": normed.view_as(t["z"])}


class Core(_TransformersOp):
    """The layer's forward between its projections: conv, split, gate, rule (with l2norm), norm."""

    op, read = "core", "conv_input"
    capabilities = msgspec.structs.replace(PLAIN, max_tokens_cpu=None)

    def __init__(self, version: str | None = None) -> None:
        super().__init__(version)
        try:
            self.caches = importlib.import_module(CACHE)
            self.cache_layer = self.caches.LinearAttentionLayer
        except (ImportError, AttributeError) as error:
            raise CannotRun(f"transformers {self.version} has no {CACHE}.LinearAttentionLayer") from error
        self.functions = {name: torch_function(name)[0] for name in (*RULES, *CONVS)}

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        """One forward per sequence. Raises Refused for what the layer does not take."""
        t, heads = call.tensors, call.options.heads
        if heads is None:
            raise Refused(f"transformers.{self.op} must be told the heads (HK, K, HV, V)")
        layer = self.layer(t, heads, call.options.eps or 1e-6)
        conv_state, state = starting_conv_state(t), gathered_state(t)
        fresh = t.get("has_initial_state")
        parts: list[dict[str, Tensor]] = []
        for n, (start, end) in enumerate(itertools.pairwise(t["cu_seqlens"].tolist())):
            if start == end:
                raise Refused(f"sequence {n} is empty: the layer is never called without a token")
            begun = (conv_state is not None or state is not None) and (fresh is None or bool(fresh[n]))
            past = None
            if begun:
                past = (
                    None if conv_state is None else conv_state[n : n + 1],
                    None if state is None else state[n : n + 1],
                )
            parts.append(self.forward(layer, t, slice(start, end), past, heads))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def forward(
        self,
        layer: Any,
        t: dict[str, Tensor],
        rows: slice,
        past: tuple[Tensor | None, Tensor | None] | None,
        heads: tuple[int, int, int, int],
    ) -> dict[str, Tensor]:
        """One sequence through the layer; every value on the way, canonical."""
        _, key_dim, n_value, value_dim = heads
        layer.in_proj_qkv.value = t["conv_input"][None, rows]
        layer.in_proj_z.value = t["z"][None, rows].flatten(2)
        layer.in_proj_a.value, layer.in_proj_b.value = t["a"][None, rows], t["b"][None, rows]
        width = t["conv_weight"].shape[1]
        cache = self.caches.Cache(layers=[self.cache_layer()])
        if past is not None:
            self.fill(cache.layers[0], past, t, width, (1, n_value, key_dim, value_dim))
        seen: dict[str, Any] = {}
        n_tokens = layer.in_proj_a.value.shape[1]
        hidden = torch.zeros(1, n_tokens, 1, dtype=t["conv_input"].dtype, device=t["conv_input"].device)
        with self.watched(seen):
            output = layer(hidden, cache=cache)
        kept = cache.layers[0]
        return {
            "normed": output[0].view(n_tokens, n_value, value_dim),
            "final_state": seen["final_state"],
            "final_conv_state": kept.conv_states[0][..., kept.conv_states[0].shape[-1] - width + 1 :],
            "conv_output": torch.cat([seen[x][0].flatten(1) for x in ("q", "k", "v")], dim=-1),
            **{x: seen[x][0] for x in ("q", "k", "v", "g", "beta", "output")},
        }

    def fill(
        self,
        layer: Any,
        past: tuple[Tensor | None, Tensor | None],
        t: dict[str, Tensor],
        width: int,
        shape: tuple[int, ...],
    ) -> None:
        """The cache as an earlier call would have left it: W inputs, of which the oldest is out of reach."""
        x = t["conv_input"]
        conv = torch.zeros(1, x.shape[1], width, dtype=x.dtype, device=x.device)
        if past[0] is not None:
            conv[:, :, 1:] = past[0]
        state = torch.zeros(shape, dtype=torch.float32, device=x.device) if past[1] is None else past[1]
        layer.lazy_initialization(conv_states=conv, conv_kernel_size=width)
        layer.lazy_initialization(recurrent_states=state)
        layer.conv_states[0].copy_(conv)
        layer.recurrent_states[0].copy_(state)
        layer.has_previous_state[0] = True

    @contextmanager
    def watched(self, seen: dict[str, Any]) -> Iterator[None]:
        """The layer's functions are its torch ones, and what the rule is handed and gives is kept."""
        before = {name: getattr(self.module, name) for name in self.functions}
        for name, function in self.functions.items():
            setattr(self.module, name, _recorded(function, seen) if name in RULES else function)
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(self.module, name, function)

    def layer(self, t: dict[str, Tensor], heads: tuple[int, int, int, int], eps: float) -> Any:
        """An instance of the layer with the case's weights, its projections replaced."""
        n_key, key_dim, n_value, value_dim = heads
        cls = self.own_class(LAYER)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.num_k_heads, layer.head_k_dim = n_key, key_dim
        layer.num_v_heads, layer.head_v_dim = n_value, value_dim
        layer.key_dim, layer.value_dim = n_key * key_dim, n_value * value_dim
        layer.conv_dim = 2 * layer.key_dim + layer.value_dim
        layer.conv_kernel_size, layer.layer_idx = t["conv_weight"].shape[1], 0
        layer.activation, layer.layer_norm_epsilon = "silu", eps
        for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"):
            setattr(layer, name, _Given())
        layer.out_proj = nn.Identity()
        layer.conv1d = nn.Conv1d(1, 1, 1)
        layer.conv1d.weight = nn.Parameter(t["conv_weight"][:, None].contiguous(), requires_grad=False)
        bias = t.get("conv_bias")
        layer.conv1d.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        layer.A_log = nn.Parameter(t["A_log"], requires_grad=False)
        layer.dt_bias = nn.Parameter(t["dt_bias"], requires_grad=False)
        layer.norm = self.own_class("RMSNormGated")(value_dim, eps=eps)
        layer.norm.weight = nn.Parameter(t["norm_weight"], requires_grad=False)
        return layer


class Gate(Core):
    """g and beta as the layer's forward hands them to its rule."""

    op, read = "gate", "b"

    def compute(self, call: KernelCall) -> dict[str, Tensor]:
        t = call.tensors
        n_tokens, n_heads = t["a"].shape
        rest = {
            "conv_input": t["a"].new_zeros(n_tokens, 2 + n_heads),
            "conv_weight": t["a"].new_zeros(2 + n_heads, 2),
            "z": t["a"].new_zeros(n_tokens, n_heads, 1),
            "norm_weight": t["a"].new_ones(1),
        }
        if n_tokens == 0:
            raise Refused("transformers.gate is never called without a token")
        heads = (1, 1, n_heads, 1)
        seen = self.forward(
            self.layer({**t, **rest}, heads, 1e-6), {**t, **rest}, slice(0, n_tokens), None, heads
        )
        return {name: seen[name] for name in ("g", "beta")}


def _recorded(function: Callable[..., Any], seen: dict[str, Any]) -> Callable[..., Any]:
    """The rule's function, showing what it was handed and what it gave."""

    def rule(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Any:
        seen.update(q=query, k=key, v=value, g=keywords["g"], beta=keywords["beta"])
        output, state = function(query, key, value, **keywords)
        seen.update(output=output, final_state=state.float())
        return output, state

    return rule


KERNELS = {"core": Core, "gate": Gate, "l2norm": L2Norm, "norm": Norm}
