"""The layer's gate as its own torch lines write it, for families whose version has no kernel for it.

Source: fla/layers/gated_deltanet.py (fla 0.4.0) and modeling_qwen3_5_moe.py (transformers 5.24) hold the same
two lines; nothing but torch is run by them.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_gate(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g [T, HV] float32 and beta [T, HV] in the dtype of b."""
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias)
    return g.float(), b.sigmoid()
