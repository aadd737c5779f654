"""The operations of a core on a terminal: one row each, what it makes, what it was handed, what arrives.

The idea: read from the top, the first row that is not `sound` is where to look. The three ratios are the
three measurements of `ops.chain`, each in units of what an honest kernel or chain errs there.
"""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from .report_words import full, number
from .verdict import DiffResult, OpFinding

WORDS = {
    (False, False): "[green]sound[/]",
    (True, False): "[bold red]made here[/]",
    (False, True): "[yellow]handed on[/]",
    (True, True): "[bold red]made here, on top of what was handed on[/]",
}
SMALL = {"final_state": "S", "final_conv_state": "conv S", "conv_output": "x", "normed": "y", "output": "o"}


def table_of_ops(result: DiffResult, *, several: bool = False) -> Table:
    """One row per operation. several: other kernels were judged too, so the table says whose it is."""
    title = escape(result.kernel) if several else None
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for name in ("operation", "kernel", "finding"):
        table.add_column(name, no_wrap=name != "finding")
    for name in ("fed", "own", "chain"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("error in the chain", no_wrap=True)
    table.add_column("first fault", overflow="fold")
    for found in result.ops:
        table.add_row(
            found.op,
            escape(found.kernel),
            word_of(found),
            number(found.ratio_fed),
            number(found.ratio_own),
            number(found.ratio_chain),
            ", ".join(f"{SMALL.get(name, name)} {number(error)}" for name, error in found.error.items()),
            "-" if found.place is None else escape(full(found.place)),
        )
    return table


def word_of(found: OpFinding) -> str:
    """Sound, made here or handed on; a verdict that is neither pass nor fail is named beside."""
    word = WORDS[found.made, found.handed_on]
    return word if found.verdict in ("pass", "fail") else f"{word} ({found.verdict})"
