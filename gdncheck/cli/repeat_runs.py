"""`gdncheck repeat`: how often a kernel fails on a case, and whether its bits move.

The library twin is compare.repeats.repeat, `gdncheck.repeat`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gdncheck.cli.options import captures_option, lengths_of, run_options, tuning_options
from gdncheck.cli.repeat import command_line
from gdncheck.cli.terminal import report_console

PIN_HELP = "as KERNEL:BK=64+num_warps=4"


@click.command()
@click.argument("case", required=False, type=click.Path())
@click.option(
    "--layer", type=click.IntRange(min=0), metavar="N", help="All captured calls of this layer, in order."
)
@captures_option
@click.option(
    "-n",
    "--runs",
    type=click.IntRange(min=1),
    default=30,
    show_default=True,
    metavar="N",
    help="Runs in each process; the first one is kept apart from the warm ones.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="M",
    help="New processes, one after the other.",
)
@click.option(
    "--rule-out",
    type=click.FloatRange(min=0, max=1, min_open=True, max_open=True),
    default=0.001,
    show_default=True,
    metavar="RATE",
    help="Say how many more clean runs rule out this failure rate.",
)
@click.option(
    "--busy/--no-busy",
    default=True,
    show_default=True,
    help="On a GPU, every second run beside a busy stream.",
)
@click.option(
    "--pin",
    "pins",
    multiple=True,
    metavar="PIN",
    help=f"Launch this configuration of an autotuned kernel, {PIN_HELP}; repeatable.",
)
@click.option(
    "--against-pin",
    "against",
    multiple=True,
    metavar="PIN",
    help="Run the same series again under this pin and compare the rates (Fisher's exact test); repeatable.",
)
@click.option(
    "--tune",
    type=click.Choice(["stock", "never", "fresh"]),
    default="stock",
    show_default=True,
    help="How other autotuned kernels choose: as their tuner does, the first configuration that fits "
    "(nothing timed), or tuned anew in every call.",
)
@tuning_options
@click.option(
    "--first", type=click.IntRange(min=1), metavar="N", help="Use the first N tokens of the first sequence."
)
@click.option(
    "--out", type=click.Path(file_okay=False), metavar="DIR", help="Also write report.json and report.txt."
)
@run_options
def repeat(
    case: str | None,
    layer: int | None,
    captures: str,
    runs: int,
    processes: int,
    rule_out: float,
    busy: bool,
    pins: tuple[str, ...],
    against: tuple[str, ...],
    tune: str,
    tunings: int,
    tuned_at: str,
    first: int | None,
    out: str | None,
    kernels: tuple[str, ...],
    device: str,
    time_limit: float,
    seed: int,
    strict: bool,
    as_json: bool,
) -> int:
    """Run kernels on CASE, or a captured layer, again and again: how often do they fail, how sure is that.

    Each distinct output is judged once. Bits that move on a fixed input are a race, or memory that nothing
    wrote, and fail a kernel that promises run-to-run equality even where every output is right.

    \b
    Example: gdncheck repeat --layer 17 --kernel fla.chunk -n 30
    Example: gdncheck repeat case.safetensors --kernel vllm.chunk@0.19.1 -n 100 --processes 3 --json
    Example: gdncheck repeat case.safetensors --kernel vllm.chunk@0.19.1 --tunings 20 --tuned-at 16,32,64
    """
    if case is None and layer is None:
        raise click.UsageError("give a case, or --layer N of a capture")
    if case is not None and layer is not None:
        raise click.UsageError(f"give a case or --layer {layer}, not both")
    from gdncheck.cli.progress import Progress
    from gdncheck.compare.autotune_sweep import pins_from
    from gdncheck.compare.repeats import repeat as run_repeats

    with Progress() as say:
        report = run_repeats(
            case, kernels or None, layer=layer, captures=captures, runs=runs, processes=processes,
            rule_out=rule_out, busy=busy, pins=pins_from(pins), against=pins_from(against) or None,
            tune=tune, tunings=tunings, tuned_at=lengths_of(tuned_at),
            first=first, device=device, time_limit=time_limit, seed=seed, strict=strict,
            progress=say, command=command_line(click.get_current_context()),
        )  # fmt: skip
    _print(report, as_json, out)
    return report.exit_status


def _print(report: Any, as_json: bool, out: str | None) -> None:
    from gdncheck.compare.repeat_report import dumps, print_report, write_report

    if out is not None:
        write_report(report, Path(out))
    if as_json:
        click.echo(dumps(report))
        return
    print_report(report, report_console())
