"""`gdncheck selftest`: planted faults on this machine; the library twin is compare.selftest.selftest."""

from __future__ import annotations

import click

from gdncheck.cli.options import device_option, json_option, seed_option
from gdncheck.cli.repeat import command_line
from gdncheck.cli.terminal import report_console


@click.command()
@device_option
@seed_option
@json_option
def selftest(device: str, seed: int, as_json: bool) -> int:
    """Plant a fault per tier and per axis in a sound kernel, on this machine, and see that each is found.

    Each check must name the planted fault and its place, and pass the sound twin. Exit status 1: it does
    not, and no other verdict of gdncheck on this machine can be relied on.

    \b
    Example: gdncheck selftest
    Example: gdncheck selftest --device cuda --json
    """
    from gdncheck.cli.progress import Progress
    from gdncheck.compare.selftest import selftest as run_selftest
    from gdncheck.compare.selftest_report import dumps, print_report

    with Progress() as say:
        report = run_selftest(
            device=device, seed=seed, progress=say, command=command_line(click.get_current_context())
        )
    if as_json:
        click.echo(dumps(report))
    else:
        print_report(report, report_console())
    return report.exit_status
