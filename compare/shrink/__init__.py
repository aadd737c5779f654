"""Shrinking: the smallest case that fails in the same way."""

from .reduce import shrink
from .result import Neighbour, Shrunk

__all__ = ["Neighbour", "Shrunk", "shrink"]
