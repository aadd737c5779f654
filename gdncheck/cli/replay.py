"""`gdncheck replay`: run a finding again in a new process. The library twin is compare.replay.replay."""

from __future__ import annotations

import click

from gdncheck.cli.finding_options import (
    axis_option,
    baseline_option,
    deviations_of,
    finding_seed_option,
    finding_time_limit_option,
    one_kernel_option,
    original_option,
)
from gdncheck.cli.options import device_option, json_option, source_option
from gdncheck.cli.repeat import command_line
from gdncheck.cli.sweep import Telling


@click.command()
@click.argument("case", type=click.Path(), metavar="CASE|RUN/SIGNATURE")
@one_kernel_option
@axis_option
@baseline_option
@click.option(
    "--runs", type=click.IntRange(min=1), metavar="N",
    help="Runs at most. Default: 3, or as many as a failure of the known rate needs to show.",
)  # fmt: skip
@original_option
@source_option
@device_option
@finding_time_limit_option
@finding_seed_option
@json_option
def replay(
    case: str,
    kernel: str | None,
    axes: tuple[str, ...],
    baseline: str | None,
    runs: int | None,
    original: bool,
    device: str,
    time_limit: float | None,
    seed: int | None,
    as_json: bool,
) -> int:
    """Run a finding again in a new process: the same failure, or what has changed since.

    Takes a shrunk case file, which says what failed on it, or a run's directory and the first digits of a
    signature. Exit status: 1 where it fails, 0 where it does not any more.

    \b
    Example: gdncheck replay small.safetensors
    Example: gdncheck replay runs/night/3f2a9c --kernel fla.chunk@0.6.0
    """
    from gdncheck.compare.replay import dumps, lines
    from gdncheck.compare.replay import replay as run_replay

    with Telling() as say:
        found = run_replay(
            case,
            kernel,
            deviations=deviations_of(axes),
            baseline=baseline,
            runs=runs,
            original=original,
            device=device,
            time_limit=time_limit,
            seed=seed,
            report=say,
            command=command_line(click.get_current_context()),
        )
    click.echo(dumps(found) if as_json else "\n".join(lines(found)))
    return found.exit_status
