"""`gdncheck diff`: kernels against truth on a case or on captured layers; two files against each other.

The library twins are compare.diff.diff and compare.casediff.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gdncheck.cli.options import captures_option, first_option, run_options
from gdncheck.cli.repeat import command_line
from gdncheck.cli.terminal import report_console

# The operations of kernels/ops/signature.py; written out, as the help must not import torch.
OPS = ("rule", "core", "conv", "conv-update", "split", "post-conv", "l2norm", "gate", "norm")


@click.command()
@click.argument("cases", nargs=-1, metavar="[CASE [OTHER]]", type=click.Path())
@click.option(
    "--layer", type=click.IntRange(min=0), metavar="N", help="All captured calls of this layer, in order."
)
@captures_option
@click.option(
    "--op",
    type=click.Choice(OPS),
    default="rule",
    show_default=True,
    help="What of the layer is judged: the rule, another operation, or core: all of them in order.",
)
@first_option
@click.option(
    "--relations",
    type=click.Choice(["auto", "none", "quick", "all"]),
    default="auto",
    show_default=True,
    help="Relations that cost runs of their own; auto: all, or quick for a slow kernel.",
)
@click.option(
    "--stages",
    is_flag=True,
    help="Compare the kernel's stage functions too: which makes an error, which hands one on.",
)
@click.option(
    "--atol",
    multiple=True,
    metavar="[TENSOR=]X",
    help="Decide by this absolute tolerance, and say so; repeatable, e.g. --atol state=1e-5.",
)
@click.option(
    "--rtol", multiple=True, metavar="[TENSOR=]X", help="Decide by this relative tolerance, and say so."
)
@click.option(
    "--out", type=click.Path(file_okay=False), metavar="DIR", help="Also write report.json and report.txt."
)
@run_options
def diff(
    cases: tuple[str, ...],
    layer: int | None,
    captures: str,
    op: str,
    first: int | None,
    relations: Any,
    stages: bool,
    atol: tuple[str, ...],
    rtol: tuple[str, ...],
    out: str | None,
    kernels: tuple[str, ...],
    device: str,
    time_limit: float,
    seed: int,
    strict: bool,
    as_json: bool,
) -> int:
    """Judge kernels on CASE, on a captured layer, or on all of them; with two cases, say how they differ.

    Each kernel gets a verdict, the rule that decided, and where it fails first.

    \b
    Example: gdncheck diff --layer 17 --kernel fla.chunk
    Example: gdncheck diff case.safetensors --kernel my_kernels:my_rule --json
    Example: gdncheck diff --layer 17 --op core --kernel fla.core,norm=my_kernels:my_norm
    Example: gdncheck diff before.safetensors after.safetensors
    """
    if len(cases) > 2:
        raise click.UsageError(f"diff takes one case, or two to compare, not {len(cases)}")
    if len(cases) == 2:
        from gdncheck.cli.casediff import print_difference

        return print_difference(cases[0], cases[1], as_json=as_json)
    if cases and layer is not None:
        raise click.UsageError(f"give a case or --layer {layer}, not both")
    from gdncheck.cli.progress import Progress
    from gdncheck.compare.diff import diff as run_diff
    from gdncheck.compare.tolerances import parse

    with Progress() as say:
        report = run_diff(
            cases[0] if cases else None,
            kernels=kernels or None,
            op=op,
            layer=layer,
            captures=captures,
            device=device,
            time_limit=time_limit,
            seed=seed,
            strict=strict,
            relations=relations,
            first=first,
            atol=parse("atol", atol),
            rtol=parse("rtol", rtol),
            stages=stages,
            progress=say,
            command=command_line(click.get_current_context()),
        )
    _print(report, as_json=as_json, out=out)
    return report.exit_status


def _print(report: Any, *, as_json: bool, out: str | None) -> None:
    """The report on stdout, and in files where asked."""
    from gdncheck.compare.jsonout import dumps
    from gdncheck.compare.report import print_report

    if as_json:
        click.echo(dumps(report))
    else:
        print_report(report, report_console())
    if out is not None:
        from gdncheck.compare.report import write_report

        write_report(report, Path(out))
