"""The stage functions of an engine's copy of fla, made to look like fla's own.

The idea: the copies keep fla's chain and its names; they differ in one argument's name and in the order
of the state's last two dimensions. With those two put right around each function, `fla_stages` walks
the chain of a copy as it walks fla's.

Leaves to others: the walk itself, dtypes and canonical layout (`fla_stages`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from .layouts import kv_to_vk, vk_to_kv

FILES = {
    "chunk_local_cumsum": "cumsum",
    "chunk_scaled_dot_kkt_fwd": "chunk_scaled_dot_kkt",
    "solve_tril": "solve_tril",
    "recompute_w_u_fwd": "wy_fast",
    "chunk_gated_delta_rule_fwd_h": "chunk_delta_h",
    "chunk_fwd_o": "chunk_o",
    "l2norm_fwd": "l2norm",
}


class VllmStages:
    """vLLM's stages as `fla_stages` expects a package: unfused, gate in natural logarithms."""

    fused = False

    def __init__(self, folder: str, version: str | None) -> None:
        """folder: dotted name of the package that holds the kernel files."""
        self.folder, self.version = folder, version

    def stage(self, name: str) -> Any:
        """A stage function by fla's name, taking and giving what fla's does."""
        function = getattr(import_module(f"{self.folder}.{FILES[name]}"), name)
        adapt = getattr(self, f"_{name}", None)
        return function if adapt is None else adapt(function)

    def _l2norm_fwd(self, function: Any) -> Any:
        # fla's gives the reciprocal norms too.
        return lambda x: (function(x), None)

    def _recompute_w_u_fwd(self, function: Any) -> Any:
        def recompute_w_u_fwd(
            k: Tensor, v: Tensor, beta: Tensor, A: Tensor, g: Tensor, cu_seqlens: Tensor
        ) -> Any:
            return function(k=k, v=v, beta=beta, A=A, g_cumsum=g, cu_seqlens=cu_seqlens)

        return recompute_w_u_fwd

    def _chunk_gated_delta_rule_fwd_h(self, function: Any) -> Any:
        def chunk_gated_delta_rule_fwd_h(
            k: Tensor, w: Tensor, u: Tensor, g: Tensor, initial_state: Tensor | None,
            output_final_state: bool, cu_seqlens: Tensor,
        ) -> Any:  # fmt: skip
            h, v_new, final_state = function(
                k=k, w=w, u=u, g=g, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
                initial_state=None if initial_state is None else kv_to_vk(initial_state),
            )  # fmt: skip
            return vk_to_kv(h), v_new, None if final_state is None else vk_to_kv(final_state)

        return chunk_gated_delta_rule_fwd_h

    def _chunk_fwd_o(self, function: Any) -> Any:
        def chunk_fwd_o(
            q: Tensor, k: Tensor, v: Tensor, h: Tensor, g: Tensor, scale: float, cu_seqlens: Tensor
        ) -> Any:
            return function(q=q, k=k, v=v, h=kv_to_vk(h), g=g, scale=scale, cu_seqlens=cu_seqlens)

        return chunk_fwd_o
