"""Axis input_dtype: the dtype of q, k and v."""

from __future__ import annotations

from .dtypes import dtype_axis

AXIS = dtype_axis("input_dtype", ("q", "k", "v"), "the dtype of q, k and v", order=20)
