"""bfloat16 arithmetic for Triton's interpreter, by replacing methods of its `InterpreterBuilder`.

Upstream (Triton 3.2 to 3.9): a bfloat16 tensor is a uint16 array of bits; casts to it cut off
instead of rounding, and sums, products, comparisons, functions and dots run on those integers, so
that results are finite garbage without an error. The idea of the cure: wherever an operand is
bfloat16, widen to float32, compute, and round to nearest even; everything else goes to the stock
method untouched. float8 casts stay upstream's own.

The comparisons of the stock builder return boolean data under the operands' dtype, so a tensor
counts as bfloat16 only where its data are the 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .bfloat16 import from_float32, from_numbers, to_float32

BITWISE = frozenset({np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift})
COMPARISONS = frozenset(
    {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal},
)


def install(interpreter: Any) -> None:
    """Replace the arithmetic of `InterpreterBuilder` in the module triton.runtime.interpreter."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "_gdncheck_bfloat16", False):
        return
    tl, handle_type = interpreter.tl, interpreter.TensorHandle
    bf16 = tl.bfloat16

    def is_bf16(handle: Any) -> bool:
        # The data's type first: it rejects nearly every tensor at the price of one comparison.
        return bool(handle.data.dtype == np.uint16 and handle.dtype.scalar == bf16)

    def widened(handle: Any) -> Any:
        return to_float32(handle.data) if is_bf16(handle) else handle.data

    def rounded(values: Any) -> Any:
        return handle_type(from_numbers(values), bf16)

    _install_casts(interpreter, builder, is_bf16)
    _install_elementwise(builder, handle_type, (tl.int1, tl.float32), is_bf16, widened, rounded)
    _install_products(builder, handle_type, is_bf16, widened, rounded)
    _install_reductions(interpreter, is_bf16, rounded)
    builder.get_bf16 = lambda self, value: rounded(np.array([value], dtype=np.float32))
    builder._gdncheck_bfloat16 = True


def _install_casts(interpreter: Any, builder: Any, is_bf16: Callable[[Any], bool]) -> None:
    """cast_impl and create_fp_to_fp: round to nearest even, or toward zero where the kernel asks for that."""
    tl, handle_type = interpreter.tl, interpreter.TensorHandle
    toward_zero_mode = interpreter._ir.ROUNDING_MODE.RTZ
    stock_cast, stock_fp_to_fp = builder.cast_impl, builder.create_fp_to_fp
    wide_enough = (tl.float16, tl.float32, tl.float64)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        target = dst_type.scalar
        if is_bf16(src):
            if target is tl.bfloat16:
                return handle_type(src.data, target)
            values = to_float32(src.data)
            if target is tl.float32:
                return handle_type(values, target)
            with np.errstate(over="ignore", invalid="ignore"):
                return handle_type(values.astype(interpreter._get_np_dtype(dst_type)), target)
        if target is tl.bfloat16:
            if src.data.dtype == np.float32:
                return handle_type(from_float32(src.data), target)
            return handle_type(from_numbers(src.data), target)
        return stock_cast(self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        target, source = dst_type.scalar, src.dtype.scalar
        if is_bf16(src) and target in wide_enough:
            # Widening is exact; float16 has its own rounding below.
            if target is not tl.float16 or rounding_mode != toward_zero_mode:
                return cast_impl(self, src, dst_type)
            src, source = handle_type(to_float32(src.data), tl.float32), tl.float32
        if target is tl.bfloat16 and source in wide_enough:
            return handle_type(from_numbers(src.data, rounding_mode == toward_zero_mode), target)
        if rounding_mode != toward_zero_mode and source in wide_enough and target in wide_enough:
            # The stock conversion rounds ties up; numpy's cast takes the even neighbour.
            return stock_cast(self, src, dst_type)
        return stock_fp_to_fp(self, src, dst_type, rounding_mode)

    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp


def _install_elementwise(
    builder: Any, handle_type: Any, types: tuple[Any, Any], is_bf16: Any, widened: Any, rounded: Any
) -> None:
    """binary_op, unary_op, ternary_op and the two functions that go round them."""
    boolean, float32 = types
    stock_binary, stock_unary, stock_ternary = builder.binary_op, builder.unary_op, builder.ternary_op
    stock_erf, stock_rsqrt = builder.create_erf, builder.create_rsqrt

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if not (is_bf16(lhs) or is_bf16(rhs)) or op in BITWISE:
            return stock_binary(self, lhs, rhs, op)
        result = op(widened(lhs), widened(rhs))
        return handle_type(result, boolean) if op in COMPARISONS else rounded(result)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        if not is_bf16(arg):
            return stock_unary(self, arg, op)
        return rounded(op(to_float32(arg.data)))

    def ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        # A select moves bits; only arithmetic (clip) must see numbers.
        if op is np.where or not is_bf16(other):
            return stock_ternary(self, lhs, rhs, other, op)
        return rounded(op(widened(lhs), widened(rhs), widened(other)))

    def through_float32(stock: Any) -> Any:
        def function(self: Any, arg: Any) -> Any:
            if not is_bf16(arg):
                return stock(self, arg)
            return rounded(stock(self, handle_type(to_float32(arg.data), float32)).data)

        return function

    builder.binary_op, builder.unary_op, builder.ternary_op = binary_op, unary_op, ternary_op
    builder.create_erf, builder.create_rsqrt = through_float32(stock_erf), through_float32(stock_rsqrt)


def _install_products(builder: Any, handle_type: Any, is_bf16: Any, widened: Any, rounded: Any) -> None:
    """create_fma and create_dot: operands exact in float32, an fma's result rounded where it is bfloat16."""
    stock_fma, stock_dot = builder.create_fma, builder.create_dot

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not (is_bf16(x) or is_bf16(y) or is_bf16(z)):
            return stock_fma(self, x, y, z)
        # The product of two 8-bit significands is exact in float32; only the sum rounds, then the result.
        result = widened(x) * widened(y) + widened(z)
        return rounded(result) if is_bf16(z) else handle_type(result, z.dtype.scalar)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if not (is_bf16(a) or is_bf16(b)):
            return stock_dot(self, a, b, d, *rest)
        # The accumulator is float32: Triton refuses a bfloat16 one.
        return handle_type(np.matmul(widened(a), widened(b)) + d.data, d.dtype.scalar)

    builder.create_fma, builder.create_dot = create_fma, create_dot


def _install_reductions(interpreter: Any, is_bf16: Any, rounded: Any) -> None:
    """ReduceOps and ScanOps on bfloat16 data: in float32, rounded once (compiled code rounds every pair)."""
    tl, handle_type = interpreter.tl, interpreter.TensorHandle

    def wrap(owner: Any, name: str) -> None:
        stock = getattr(owner, name)

        def method(self: Any, operand: Any, *args: Any, **kwargs: Any) -> Any:
            first = operand[0] if isinstance(operand, tuple) else operand
            if not is_bf16(first.handle):
                return stock(self, operand, *args, **kwargs)
            kind = tl.block_type(tl.float32, list(first.handle.data.shape))
            wide = tl.core.tensor(handle_type(to_float32(first.handle.data), tl.float32), kind)
            return narrow(stock(self, wide, *args, **kwargs))

        setattr(owner, name, method)

    def narrow(result: Any) -> Any:
        """Back to bfloat16 wherever the float32 detour produced numbers (indices stay int32)."""
        if isinstance(result, (list, tuple)):
            return type(result)(narrow(part) for part in result)
        if result.dtype.scalar is not tl.float32:
            return result
        kind = tl.block_type(tl.bfloat16, list(result.type.shape)) if result.type.is_block() else tl.bfloat16
        return tl.core.tensor(rounded(result.handle.data), kind)

    for owner, names in (
        (interpreter.ReduceOps, ("sum", "min_max")),
        (interpreter.ScanOps, ("cumsum", "cumprod")),
    ):
        for name in names:
            if hasattr(owner, name):
                wrap(owner, name)
