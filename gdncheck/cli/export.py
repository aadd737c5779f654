"""`gdncheck export`: a stand-alone script and the text of an upstream report.

The library twin is compare.export.export.
"""

from __future__ import annotations

import json
from typing import Any

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

ENDED = {0: "the fault did not show", 1: "the fault shows"}


@click.command()
@click.argument("case", type=click.Path(), metavar="CASE|RUN/SIGNATURE")
@click.option(
    "-o", "--out", required=True, type=click.Path(file_okay=False), metavar="DIR",
    help="New or empty directory for repro.py, tensors.safetensors and report.md.",
)  # fmt: skip
@one_kernel_option
@axis_option
@baseline_option
@click.option(
    "--values", type=click.Choice(["exact", "seeded"]), default="exact", show_default=True,
    help="seeded: numbers from a seed in place of the case's own, if the failure is the same on them.",
)  # fmt: skip
@click.option("--no-run", is_flag=True, help="Do not run the kernel here; go by what the finding says.")
@original_option
@source_option
@device_option
@finding_time_limit_option
@finding_seed_option
@json_option
def export(
    case: str,
    out: str,
    kernel: str | None,
    axes: tuple[str, ...],
    baseline: str | None,
    values: str,
    no_run: bool,
    original: bool,
    device: str,
    time_limit: float | None,
    seed: int | None,
    as_json: bool,
) -> int:
    """Write a script that shows a failure without gdncheck, and the text of an upstream report.

    The script needs torch, safetensors and the kernel's package. It ends with 1 while the fault shows and
    with 0 once it is mended. Where the kernel runs here, so does the script, in a new process.

    \b
    Example: gdncheck export small.safetensors -o report
    Example: gdncheck export runs/night/3f2a9c -o report --values seeded
    """
    from gdncheck.compare.export import export as run_export

    with Telling() as say:
        done = run_export(
            case,
            out,
            kernel,
            deviations=deviations_of(axes),
            baseline=baseline,
            values=values,
            run=not no_run,
            original=original,
            device=device,
            time_limit=time_limit,
            seed=seed,
            report=say,
            command=command_line(click.get_current_context()),
        )
    click.echo(json.dumps(_document(done), indent=2) if as_json else "\n".join(_lines(done)))
    return done.exit_status


def _lines(done: Any) -> list[str]:
    lines = [f"{done.directory}: {', '.join(done.files)}; values {done.values}"]
    if done.note:
        lines.append(done.note)
    if done.script_status is not None:
        word = ENDED.get(done.script_status, "it broke off")
        lines.append(
            f"repro.py, run in a new process without gdncheck, ended with {done.script_status}: {word}"
        )
    return [*lines, f"exported in {done.seconds:.1f} s: {done.command}"]


def _document(done: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "directory": str(done.directory),
        "files": list(done.files),
        "kernel": done.kernel,
        "signature": done.facts.signature,
        "values": done.values,
        "note": done.note or None,
        "script_status": done.script_status,
        "seconds": done.seconds,
        "command": done.command,
    }
