"""Work of the interpreter that cannot change a result, left out or remembered.

Upstream (Triton 3.2 to 3.9), per tensor operation of a kernel: the overflow check of every integer
sum or product computes it again in int64 and then asserts nothing, since assertions are off; a table
of twenty numpy types is built to look one up; the shape of every tensor is wrapped anew. Each cure is
installed only where the thing that it replaces looks as expected. Measured with fla-core 0.4.0,
200 tokens, 4 heads of 64 x 64: the chunk kernel takes half the time.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def install(interpreter: Any) -> list[str]:
    """Apply what fits this Triton; returns the names of what was applied."""
    if getattr(interpreter, "_gdncheck_speed", None) is not None:
        return list(interpreter._gdncheck_speed)
    applied = []
    if _drop_unasserted_overflow_checks(interpreter.interpreter_builder):
        applied.append("overflow-checks")
    if _remember_numpy_types(interpreter):
        applied.append("numpy-types")
    if _remember_shapes(interpreter.tl, interpreter.TensorHandle):
        applied.append("shapes")
    if _remember_block_types(interpreter.tl):
        applied.append("block-types")
    interpreter._gdncheck_speed = tuple(applied)
    return applied


def _drop_unasserted_overflow_checks(builder: Any) -> bool:
    """Only where debug is off: with it the check raises, and is kept."""
    options = getattr(builder, "options", None)
    if options is None or getattr(options, "debug", True) or not hasattr(options, "sanitize_overflow"):
        return False
    builder.options = dataclasses.replace(options, sanitize_overflow=False)
    return True


def _remember_numpy_types(interpreter: Any) -> bool:
    """The numpy type of a Triton type, by the type's name (unique per scalar, pointer and block type)."""
    stock = interpreter._get_np_dtype
    known: dict[tuple[type, str], Any] = {}

    def get_np_dtype(tt_dtype: Any) -> Any:
        element = getattr(tt_dtype, "element_ty", tt_dtype)
        key = (type(tt_dtype), str(element))
        if key not in known:
            known[key] = stock(tt_dtype)
        return known[key]

    interpreter._get_np_dtype = get_np_dtype
    return True


def _remember_shapes(tl: Any, handle_type: Any) -> bool:
    """Give tensors of one shape the same wrapped shape; False where tensors hold more than is known here."""
    import numpy as np

    tensor = tl.core.tensor
    stock = tensor.__init__
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        wrapped = known.get(shape)
        if wrapped is None:
            stock(self, handle, type)
            known[shape] = (self.shape, self.numel)
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = wrapped

    probe_type = tl.block_type(tl.float32, [4])
    probe = tensor(handle_type(np.zeros(4, dtype=np.float32), tl.float32), probe_type)
    if set(vars(probe)) != {"handle", "shape", "numel", "type", "dtype"}:
        return False
    tensor.__init__ = init
    return True


def _remember_block_types(tl: Any) -> bool:
    """Give block types of one element type and shape the same description; same condition as for shapes."""
    block_type = tl.block_type
    stock = block_type.__init__
    known: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, tuple([getattr(size, "value", size) for size in shape]))
        described = known.get(key)
        if described is None:
            stock(self, element_ty, shape)
            known[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
            return
        self.element_ty = element_ty
        self.__dict__.update(described)

    if set(vars(tl.block_type(tl.float32, [4]))) != {"element_ty", "shape", "numel", "name"}:
        return False
    block_type.__init__ = init
    return True
