"""bfloat16 between its 16 bits and float32, in numpy: round to nearest even, NaN stays NaN.

The one idea: a bfloat16 is the upper half of a float32, so widening is a shift and narrowing is one
integer addition that carries. The interpreter keeps bfloat16 tensors as uint16 arrays of these bits.
Which operations must go through float32 is `builder`'s business.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

QUIET_NAN = np.uint16(0x7FC0)
_HALF_ULP_BELOW_EVEN = np.uint32(0x7FFF)


def to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 values of bfloat16 bits, any shape; exact, NaN payloads and signs kept."""
    wide = np.left_shift(bits, np.uint32(16), dtype=np.uint32)
    return wide.view(np.float32)


def from_float32(values: NDArray[np.float32], toward_zero: bool = False) -> NDArray[np.uint16]:
    """The bfloat16 bits nearest to float32 values (ties to even), or cut off where `toward_zero`.

    Overflow beyond the largest finite bfloat16 rounds to infinity, subnormals are kept, every NaN
    becomes the quiet NaN 0x7FC0 with a positive sign, as torch's cast on a CPU makes it.
    """
    values = np.ascontiguousarray(values, dtype=np.float32).reshape(np.shape(values))
    bits = values.view(np.uint32)
    if toward_zero:
        narrow = bits >> np.uint32(16)
    else:
        # Adding just under half an ulp, plus one where the last kept bit is odd, carries into the
        # kept half exactly when the value lies above the tie, or on it with an odd neighbour below.
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        narrow = (bits + (odd + _HALF_ULP_BELOW_EVEN)) >> np.uint32(16)
    out = narrow.astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        out = np.where(nan, QUIET_NAN, out)
    return out


def from_numbers(values: NDArray[np.generic], toward_zero: bool = False) -> NDArray[np.uint16]:
    """bfloat16 bits of integers, booleans, float16, float32 or float64, through float32 as torch goes."""
    with np.errstate(over="ignore", invalid="ignore"):
        return from_float32(values.astype(np.float32, copy=False), toward_zero)
