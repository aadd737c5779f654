"""`gdncheck fuzz`: seeded cases overnight, every distinct failure kept once, confirmed and shrunk.

The library twin is compare.fuzz.fuzz.fuzz.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import click

from gdncheck.cli.options import run_options, time_limit_of
from gdncheck.cli.repeat import command_line
from gdncheck.cli.sweep import Duration, axes_of, names_of


class Shard(click.ParamType):  # type: ignore[type-arg]
    """`i/n`, i from 1; kept as typed."""

    name = "shard"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if re.fullmatch(r"\d+/\d+", str(value)) is None:
            self.fail(f"{value!r} is no shard; write 3/8 for the third of eight", param, ctx)
        return str(value)


@click.command()
@click.option("--hours", type=click.FloatRange(min=0, min_open=True), metavar="N", help="Run for so long.")
@click.option("--for", "duration", type=Duration(), metavar="TIME", help="The same as 90s, 10m or 8h.")
@click.option("--cases", type=click.IntRange(min=1), metavar="N", help="Stop after so many cases in all.")
@click.option(
    "--from", "captures", multiple=True, type=click.Path(), metavar="PATH",
    help="Cut cases from these captures too: a file or a directory, repeatable.",
)  # fmt: skip
@click.option(
    "--axis",
    "axes",
    multiple=True,
    metavar="NAME=V1,V2",
    help="Draw these values of an axis often, repeatable.",
)
@click.option("--only", multiple=True, metavar="A,B", help="Only these axes.")
@click.option("--except", "excepted", multiple=True, metavar="A,B", help="All axes but these.")
@click.option("--baseline", metavar="NAME|FILE", help="What production runs, as for sweep.")
@click.option(
    "--shape", "shapes", multiple=True, metavar="HKxHVxKxV:DTYPE",
    help="Heads, dims and dtype of synthetic cases, repeatable: 2x4x128x128:bf16.",
)  # fmt: skip
@click.option("--family", "families", multiple=True, metavar="A,B", help="Only these synthetic families.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Tokens of a case at most.")
@click.option(
    "--tune", type=click.Choice(["never", "stock"]), default="never", show_default=True,
    help="Triton kernels take their first configuration, or time all of them.",
)  # fmt: skip
@click.option(
    "--batch", type=click.IntRange(min=1), default=32, show_default=True, metavar="N",
    help="Cases of a kernel in flight at most.",
)  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Runners per device.")
@click.option("--shard", type=Shard(), default="1/1", metavar="I/N", help="Only this share of the numbers.")
@click.option(
    "--shrink-budget", "shrink_seconds", type=Duration(), default=120.0, show_default="2m", metavar="TIME",
    help="Time to shrink each finding.",
)  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False), metavar="DIR", help="Keep the run here.")
@click.option("--resume", is_flag=True, help="Go on with the run in --out.")
@click.option(
    "--json-lines", type=click.Path(dir_okay=False), metavar="FILE", help="Log events to this file."
)
@partial(run_options, time_limit=time_limit_of(120.0))
def fuzz(
    hours: float | None,
    duration: float | None,
    json_lines: str | None,
    axes: tuple[str, ...],
    only: tuple[str, ...],
    excepted: tuple[str, ...],
    families: tuple[str, ...],
    shard: str,
    kernels: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> int:
    """Fuzz kernels with seeded cases until the time is up; Ctrl-C ends with the summary.

    Each distinct failure is kept once in --out, confirmed in a fresh process, and shrunk. A run that was
    killed goes on with --resume. Without --hours, --for or --cases it takes 10 minutes.

    \b
    Example: gdncheck fuzz --hours 8 --out runs/night --kernel fla.chunk
    Example: gdncheck fuzz --for 10m --from captures/ --axis split=at-63,at-65 --seed 7
    """
    if hours is not None and duration is not None:
        raise click.UsageError("give --hours or --for, not both")
    from gdncheck.cli.fuzz_screen import Screen
    from gdncheck.compare.fuzz.fuzz import fuzz as run_fuzz

    i, _, n = shard.partition("/")
    seconds = duration if hours is None else hours * 3600
    with Screen(seconds, options["cases"], json_lines) as screen:
        report = run_fuzz(
            kernels=kernels or None,
            seconds=seconds,
            axes=axes_of(axes),
            only=names_of(only),
            excepted=names_of(excepted),
            families=names_of(families),
            shard=(int(i), int(n)),
            progress=screen,
            command=command_line(click.get_current_context()),
            **options,
        )
    return tell(report, as_json)


def tell(report: Any, as_json: bool) -> int:
    """Print a run's document or its summary; returns the exit status."""
    if as_json:
        from gdncheck.compare.fuzz.jsonout import dumps

        click.echo(dumps(report))
    else:
        from gdncheck.compare.fuzz.summary import lines

        for line in lines(report):
            click.echo(line)
    status: int = report.exit_status
    return status
