"""`gdncheck kernels bisect`: the first release, or commit, of a kernel that changes the verdict on a case.

The library twin is compare.bisect.bisect.
"""

from __future__ import annotations

from typing import Any

import click

from gdncheck.cli.options import (
    cache_option,
    device_option,
    first_option,
    json_option,
    seed_option,
    source_option,
    time_limit_option,
)
from gdncheck.cli.repeat import command_line


@click.command()
@click.argument("kernel", metavar="FAMILY.OP")
@click.argument("case", type=click.Path())
@click.option("--good", required=True, metavar="END", help="Version, or git:REV, with the right verdict.")
@click.option("--bad", required=True, metavar="END", help="Version, or git:REV, with the other verdict.")
@click.option("--offline", is_flag=True, help="Only versions in the cache or installed; fetch nothing.")
@first_option
@click.option(
    "--relations",
    type=click.Choice(["auto", "none", "quick", "all"]),
    default="auto",
    show_default=True,
    help="Relations that a release is asked for, as in diff.",
)
@source_option
@cache_option
@device_option
@time_limit_option
@seed_option
@json_option
def bisect(
    kernel: str,
    case: str,
    good: str,
    bad: str,
    offline: bool,
    first: int | None,
    relations: Any,
    cache_dir: str | None,
    device: str,
    time_limit: float,
    seed: int,
    as_json: bool,
) -> int:
    """Find the first version of FAMILY.OP between two that changes the verdict on CASE.

    Both ends are judged first. Versions come from the cache and the package index, commits from the clone
    of --source, along first parents; one that cannot be run is passed over and named.

    \b
    Example: gdncheck kernels bisect fla.chunk --good 0.6.0 --bad 0.4.0 case.safetensors
    Example: gdncheck kernels bisect fla.chunk CASE --good git:v0.5.0 --bad git:main --source fla=DIR
    """
    from gdncheck.cli.progress import Progress
    from gdncheck.compare.bisect import bisect as run_bisect
    from gdncheck.compare.bisect import lines_of

    with Progress() as say:
        found = run_bisect(
            kernel,
            case,
            good=good,
            bad=bad,
            offline=offline,
            cache_dir=cache_dir,
            device=device,
            time_limit=time_limit,
            seed=seed,
            relations=relations,
            first=first,
            progress=say,
            command=command_line(click.get_current_context()),
        )
    if as_json:
        import msgspec

        document = {"schema": 1, **msgspec.to_builtins(found), "skipped": msgspec.to_builtins(found.skipped)}
        click.echo(msgspec.json.encode(document).decode())
        return 0
    for line in lines_of(found):
        click.echo(line)
    return 0
