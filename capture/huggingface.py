"""A canonical case from one recorded call of a transformers layer.

The idea: one place turns transformers' layout into the case file's, and changes no value: batches of B
sequences become packed sequences, key heads that 5.7 repeated for each value head become single heads
again (only where they are exact repeats), the conv cache of W columns loses the oldest, which no later
token reads.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from .case import CallOptions, Case, Origin
from .checkpoint import What
from .errors import CannotRun
from .hooks import LayerCall

SAME_SIZE_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """What every case of one captured run shares."""

    model: str
    token_hash: str
    engine: str
    """`transformers@5.24.0`"""
    model_config: dict[str, Any] = {}
    fingerprint: dict[str, Any] = {}


def case_from_huggingface(call: LayerCall, source: Source, what: What, note: str | None = None) -> Case:
    """The call as a case, dtypes kept.

    Raises CannotRun for a batch of sequences that are packed as well (nothing in transformers does that).
    """
    batch, length = call.rule["v"].shape[:2]  # type: ignore[union-attr]
    tensors = _rule_tensors(call, batch, length)
    if what == "core":
        tensors |= _core_tensors(call, batch)
    module = call.module
    decodes = length == 1 and call.rule.get("initial_state") is not None
    return Case(
        op="core" if what == "core" else "rule",
        tensors=tensors,
        options=CallOptions(
            qk="raw" if call.l2norm_in_kernel else "normalised",
            scale=call.scale,
            rms_eps=float(getattr(module, "layer_norm_epsilon", 1e-6)),
        ),
        origin=Origin(
            kind="capture",
            model=source.model,
            model_class=type(module).__name__,
            layer=call.layer,
            call=call.call,
            phase="decode" if decodes else "prefill",
            token_hash=source.token_hash,
            engine=source.engine,
            backend=call.backend,
            note=note,
        ),
        model_config=source.model_config,
        fingerprint=source.fingerprint,
        finite=all(
            bool(torch.isfinite(t).all()) for n, t in tensors.items() if not n.startswith("observed_")
        ),
    )


def single_heads(x: Tensor, n_heads: int) -> Tensor:
    """[T, n_heads * r, K] -> [T, n_heads, K] where r heads are one repeated bit for bit; else x as it is."""
    tokens, heads, dim = x.shape
    if heads == n_heads or heads % n_heads:
        return x
    bits = x.view(SAME_SIZE_INTEGER[x.element_size()]).view(tokens, n_heads, heads // n_heads, dim)
    if not torch.equal(bits, bits[:, :, :1].expand_as(bits)):
        return x
    return x.view(tokens, n_heads, heads // n_heads, dim)[:, :, 0].contiguous()


def _rule_tensors(call: LayerCall, batch: int, length: int) -> dict[str, Tensor]:
    rule = {name: tensor for name, tensor in call.rule.items() if tensor is not None}
    key_heads = int(call.module.num_k_heads)  # type: ignore[arg-type]
    tensors = {name: _packed(rule[name]) for name in ("q", "k", "v", "g", "beta")}
    tensors["q"], tensors["k"] = single_heads(tensors["q"], key_heads), single_heads(tensors["k"], key_heads)
    tensors["cu_seqlens"] = torch.arange(batch + 1) * length
    if "cu_seqlens" in rule:
        if batch != 1:
            raise CannotRun(f"layer {call.layer}: {batch} rows that are packed as well; pack into one row")
        tensors["cu_seqlens"] = rule["cu_seqlens"].to(torch.int64)
    if "initial_state" in rule:
        tensors["initial_state"] = rule["initial_state"]
    tensors["observed_output"] = _packed(_present(call.output))
    if call.final_state is not None:
        tensors["observed_final_state"] = call.final_state
    return tensors


def _core_tensors(call: LayerCall, batch: int) -> dict[str, Tensor]:
    conv_input, z, a, b = _projected(call)
    tensors = {"conv_input": conv_input, "z": z, "a": a, "b": b}
    tensors |= {name: weight for name, weight in call.weights.items() if weight is not None}
    columns = tensors["conv_weight"].shape[-1] - 1
    if call.conv_state is not None:
        tensors["conv_state"] = call.conv_state[..., call.conv_state.shape[-1] - columns :].contiguous()
    if call.new_conv_state is not None:
        tensors["observed_conv_state"] = call.new_conv_state[
            ..., call.new_conv_state.shape[-1] - columns :
        ].contiguous()
    tensors["observed_core_output"] = _present(call.core_output).view_as(z)
    tensors["observed_layer_output"] = _packed(_present(call.layer_output))
    return tensors


def _projected(call: LayerCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """conv_input [T, D] in the order q|k|v, z [T, HV, V], a, b [T, HV] from the projections' outputs.

    Qwen3-Next projects q, k, v, z (and b, a) interleaved by key head; its own method sorts them out.
    """
    module, outputs = call.module, call.projections
    if "in_proj_qkvz" in outputs:
        q, k, v, z, b, a = module.fix_query_key_value_ordering(outputs["in_proj_qkvz"], outputs["in_proj_ba"])  # type: ignore[operator]
        conv_input = torch.cat([x.reshape(*x.shape[:2], -1) for x in (q, k, v)], dim=-1)
    else:
        conv_input, z, b, a = (outputs[f"in_proj_{name}"] for name in ("qkv", "z", "b", "a"))
    conv_input, z, a, b = (_packed(x) for x in (conv_input, z, a, b))
    heads, dim = call.rule["v"].shape[-2:]  # type: ignore[union-attr]
    return conv_input, z.reshape(-1, heads, dim), a.contiguous(), b.contiguous()


def _packed(x: Tensor) -> Tensor:
    """[B, T, ...] -> [B * T, ...]"""
    return x.flatten(0, 1).contiguous()


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "the hooks kept every output"
    return tensor
