"""Where a report is printed: as wide as the terminal, and of one width where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Columns of a report in a pipe or a file: rich would take 80 and fold its tables.
PIPE_WIDTH = 140


def report_console(pipe_width: int = PIPE_WIDTH) -> Console:
    """The console of stdout. Imports rich, so only a command that prints a report calls it."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=pipe_width)
