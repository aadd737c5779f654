"""`gdncheck shrink`: the smallest case that fails in the same way.

The library twin is compare.shrink.shrink.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from gdncheck.cli.finding_options import (
    axis_option,
    baseline_option,
    deviations_of,
    finding_time_limit_option,
    one_kernel_option,
)
from gdncheck.cli.options import device_option, json_option, source_option
from gdncheck.cli.repeat import command_line
from gdncheck.cli.sweep import Duration, Telling
from gdncheck.cli.terminal import report_console

WIDTH = 100


class SignatureWord(click.ParamType):  # type: ignore[type-arg]
    """16 hex digits that name a finding."""

    name = "signature"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"[0-9a-f]{16}", str(value)):
            self.fail(f"{value!r} is no signature; give the 16 hex digits that a finding has", param, ctx)
        return str(value)


@click.command()
@click.argument("case", type=click.Path(), metavar="CASE|RUN/SIGNATURE")
@one_kernel_option
@click.option(
    "-o", "--out", required=True, type=click.Path(dir_okay=False), metavar="FILE",
    help="Where the smallest case goes; the nearest passing one lies beside it.",
)  # fmt: skip
@click.option("--signature", type=SignatureWord(), help="Shrink this failure and no other.")
@axis_option
@baseline_option
@click.option(
    "--budget", type=Duration(), default=300.0, show_default="5m", metavar="TIME",
    help="Return the best so far after this: 90s, 10m, 1h.",
)  # fmt: skip
@click.option("--runs", type=click.IntRange(min=1), metavar="N", help="Also after so many kernel runs.")
@source_option
@device_option
@finding_time_limit_option
@click.option(
    "--seed", type=int, metavar="N", help="Seed of schedules and neighbours. Default: the finding's."
)
@json_option
def shrink(
    case: str,
    kernel: str | None,
    out: str,
    signature: str | None,
    axes: tuple[str, ...],
    baseline: str | None,
    budget: float,
    runs: int | None,
    device: str,
    time_limit: float | None,
    seed: int | None,
    as_json: bool,
) -> int:
    """Make a failing case as small as it goes while it fails in the same way.

    Takes away sequences, splits, heads, tokens, dimensions, deviations and values. What has to stay: the
    kind of failure, its tensor and its place pattern. Where it comes and goes, every candidate gets a
    sequential test. Ctrl-C writes the best so far; the same command goes on after a kill.

    \b
    Example: gdncheck shrink case.safetensors --kernel fla.chunk -o small.safetensors
    Example: gdncheck shrink runs/night/3f2a9c -o small.safetensors --budget 10m
    """
    from gdncheck.compare.shrink import shrink as run_shrink
    from gdncheck.compare.shrink.report import dumps, print_report

    with Telling() as say:
        shrunk = run_shrink(
            case,
            kernel,
            signature=signature,
            deviations=deviations_of(axes),
            budget=budget,
            runs=runs,
            seed=seed,
            report=say,
            out=Path(out),
            baseline=baseline,
            device=device,
            time_limit=time_limit,
            command=command_line(click.get_current_context()),
        )
    if as_json:
        click.echo(dumps(shrunk))
    else:
        print_report(shrunk, report_console(WIDTH))
    return shrunk.exit_status
