"""Axis beta_dtype: the dtype in which beta reaches the kernel."""

from __future__ import annotations

from .dtypes import dtype_axis

AXIS = dtype_axis("beta_dtype", ("beta",), "the dtype in which beta reaches the kernel", order=22)
