"""Options of the commands that take a finding: what they leave out, the finding says."""

from __future__ import annotations

import click

from gdncheck.cli.sweep import axes_of


def deviations_of(words: tuple[str, ...]) -> dict[str, str] | None:
    """{axis: value} of `name=value` words; None without any."""
    found = axes_of(words)
    several = [name for name, values in found.items() if len(values) != 1]
    if several:
        raise click.UsageError(
            f"--axis {several[0]} has {len(found[several[0]])} values; give the one that fails"
        )
    return {name: values[0] for name, values in found.items()} or None


axis_option = click.option(
    "--axis", "axes", multiple=True, metavar="NAME=VALUE",
    help="What it fails under, repeatable: --axis split=at-63. Default: what the finding says.",
)  # fmt: skip
one_kernel_option = click.option(
    "--kernel", metavar="NAME", help="Kernel that fails on it. Default: the one that the finding names."
)
baseline_option = click.option(
    "--baseline", metavar="NAME|FILE", help="What the deviations depart from, as for sweep."
)
original_option = click.option(
    "--original", is_flag=True, help="The case as it was found, not the shrunk one."
)
finding_time_limit_option = click.option(
    "--time-limit", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
    help="Limit for one kernel call. Default: the finding's, else 300.",
)  # fmt: skip
finding_seed_option = click.option(
    "--seed", type=int, metavar="N", help="Seed of schedules. Default: the finding's."
)
