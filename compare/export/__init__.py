"""Exporting: a stand-alone script, its tensors and the text of an upstream report."""

from .export import Exported, export

__all__ = ["Exported", "export"]
