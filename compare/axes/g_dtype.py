"""Axis g_dtype: the dtype in which the log decay reaches the kernel."""

from __future__ import annotations

from .dtypes import dtype_axis

AXIS = dtype_axis("g_dtype", ("g",), "the dtype in which the log decay reaches the kernel", order=24)
