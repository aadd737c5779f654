"""`gdncheck sanitize`: a case under compute-sanitizer; the library twin is compare.sanitize.sanitize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gdncheck.cli.options import (
    captures_option,
    first_option,
    json_option,
    kernel_option,
    seed_option,
    source_option,
    strict_option,
)
from gdncheck.cli.repeat import command_line
from gdncheck.cli.terminal import report_console


@click.command()
@click.argument("case", required=False, type=click.Path())
@click.option("--layer", type=click.IntRange(min=0), metavar="N", help="All captured calls of this layer.")
@captures_option
@click.option(
    "--tool", "tools", type=click.Choice(["memcheck", "racecheck", "initcheck", "synccheck"]), multiple=True,
    default=["memcheck"], show_default="memcheck",
    help="What to look for: accesses out of bounds, races in shared memory, reads of what nobody wrote, "
    "barriers; repeatable.",
)  # fmt: skip
@first_option
@click.option(
    "--time-limit", type=click.FloatRange(min=0, min_open=True), default=600.0, show_default=True,
    metavar="SECONDS", help="Limit for one call under the tool, compile included.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(file_okay=False), metavar="DIR",
    help="Also write report.json, report.txt and the tools' own logs.",
)  # fmt: skip
@kernel_option
@source_option
@seed_option
@strict_option
@json_option
def sanitize(
    case: str | None,
    layer: int | None,
    captures: str,
    tools: tuple[str, ...],
    first: int | None,
    time_limit: float,
    out: str | None,
    kernels: tuple[str, ...],
    seed: int,
    strict: bool,
    as_json: bool,
) -> int:
    """Run kernels once on CASE, or a captured layer, under NVIDIA's compute-sanitizer (GPU).

    Torch's caching allocator is off meanwhile and nothing is tuned. Each report is given with the stage that
    the function belongs to and, where its grid is known, the sequence, head and chunk of its block. The tools
    are slow: use a small case, or --first. Exit status 3 where the tool or a GPU is missing.

    \b
    Example: gdncheck sanitize case.safetensors --kernel fla.chunk --first 130
    Example: gdncheck sanitize case.safetensors --kernel vllm.chunk@0.19.1 --tool racecheck --tool initcheck
    """
    if case is None and layer is None:
        raise click.UsageError("give a case, or --layer N of a capture")
    if case is not None and layer is not None:
        raise click.UsageError(f"give a case or --layer {layer}, not both")
    from gdncheck.cli.progress import Progress
    from gdncheck.compare.sanitize import sanitize as run_sanitize

    with Progress() as say:
        report = run_sanitize(
            case, kernels or None, layer=layer, captures=captures, tools=tools, first=first,
            time_limit=time_limit, seed=seed, strict=strict, progress=say,
            command=command_line(click.get_current_context()),
        )  # fmt: skip
    _print(report, as_json, out)
    return report.exit_status


def _print(report: Any, as_json: bool, out: str | None) -> None:
    from gdncheck.compare.sanitize_report import dumps, print_report, write_report

    if out is not None:
        write_report(report, Path(out))
    if as_json:
        click.echo(dumps(report))
        return
    print_report(report, report_console())
