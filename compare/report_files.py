"""A report on disk: report.json and report.txt, and what else belongs to it.

The idea: every command that has --out writes its document and what a person would have read on the terminal,
each file whole or not at all. What stands in them is the report modules' business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path

from rich.console import Console

from ..capture.atomic import atomic_path

WIDTH = 140


def write_files(
    directory: Path,
    document: str,
    draw: Callable[[Console], None],
    *,
    more: Mapping[str, str] | None = None,
    width: int = WIDTH,
) -> list[Path]:
    """Write the document, what `draw` prints at this width, and further files by name. Raises BadInput."""
    text = StringIO()
    draw(Console(file=text, width=width, no_color=True))
    files = {"report.json": document + "\n", "report.txt": text.getvalue(), **(more or {})}
    for name, content in files.items():
        with atomic_path(directory / name) as temporary:
            temporary.write_text(content, encoding="utf-8")
    return [directory / name for name in files]
