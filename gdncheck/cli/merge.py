"""`gdncheck merge`: runs of fuzz as one run. The library twin is compare.fuzz.merge.merge."""

from __future__ import annotations

import click

from gdncheck.cli.fuzz import tell
from gdncheck.cli.options import json_option
from gdncheck.cli.repeat import command_line


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False))
@click.option("--out", required=True, type=click.Path(file_okay=False), metavar="DIR", help="The joined run.")
@json_option
def merge(runs: tuple[str, ...], out: str, as_json: bool) -> int:
    """Join RUNS of fuzz (shards of an array job) into one: findings by signature, counts added.

    Merging a run again adds nothing; one that has gone on since replaces what it said before.

    \b
    Example: gdncheck merge runs/night.1 runs/night.2 --out runs/night
    """
    from gdncheck.compare.fuzz.merge import merge as run_merge

    return tell(run_merge(runs, out=out, command=command_line(click.get_current_context())), as_json)
