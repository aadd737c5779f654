"""The operations that can be judged, by name. A new one is a file beside this and a line here."""

from __future__ import annotations

from . import conv, gate, l2norm, norm, post_conv, split
from .op import Op

OPS: dict[str, Op] = {
    op.name: op for op in (conv.OP, conv.UPDATE, split.OP, post_conv.OP, l2norm.OP, gate.OP, norm.OP)
}
