"""How places and numbers are written: the one formatter that reasons, tables and messages share."""

from __future__ import annotations

import math

from .verdict import Place


def where(place: Place) -> str:
    """`sequence 0, head 2, chunk 31, token 2000`: the parts that are known."""
    parts = [
        f"{name} {value}"
        for name in ("sequence", "head", "chunk", "token")
        if (value := getattr(place, name)) is not None
    ]
    return ", ".join(parts) or "no particular place"


def full(place: Place) -> str:
    """With the tensor and the class in front."""
    return f"{place.tensor} {place.class_} at {where(place)}"


def number(value: float | None) -> str:
    """Three digits, or a dash."""
    if value is None:
        return "-"
    if math.isnan(value):
        return "nan"
    return f"{value:.3g}"
