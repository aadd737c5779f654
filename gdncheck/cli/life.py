"""`gdncheck life`: histories of an engine's calls through kernels and their slots, every step checked.

The library twin is compare.life.life.life, `gdncheck.life`.
"""

from __future__ import annotations

from pathlib import Path

import click

from gdncheck.cli.options import (
    device_option,
    json_option,
    seed_option,
    source_option,
    time_limit_option,
)
from gdncheck.cli.repeat import command_line
from gdncheck.cli.terminal import report_console


def _dims(text: str | None) -> tuple[int, int] | None:
    """`64,64`, which stays a text until here so that the last line can print it."""
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 2 or not all(p.isdecimal() and int(p) for p in parts):
        raise click.BadParameter(f"--dims {text!r} is not K,V such as 64,64")
    return int(parts[0]), int(parts[1])


@click.command()
@source_option
@click.option(
    "--kernel", "kernels", multiple=True, metavar="NAME",
    help="Kernel under test, repeatable; without other options it plays every role. Default: reference, the "
    "rule in float64, which tests the bookkeeper.",
)  # fmt: skip
@click.option("--decode", metavar="NAME", help="Kernel of decode steps.")
@click.option("--verify", metavar="NAME", help="Kernel of verify steps. Default: that of decode.")
@click.option("--conv", metavar="NAME", help="Convolution of prefills. Default: the reference.")
@click.option("--conv-update", metavar="NAME", help="Convolution of other steps. Default: the reference.")
@click.option(
    "--bookkeeper", default="sound", show_default=True, metavar="NAME",
    help="Who hands out slots: sound, sound-clears, planted:FAULT, or package.module:Class.",
)  # fmt: skip
@click.option(
    "--steps", type=click.IntRange(min=1), default=2000, show_default=True, metavar="N",
    help="Stop after so many steps without a fault.",
)  # fmt: skip
@click.option(
    "--history", metavar="FILE",
    help="Run this history instead of drawn ones: a file, or a name (prefill, verify-0, slot-reuse, ...).",
)  # fmt: skip
@click.option(
    "--slots", type=click.IntRange(min=4), default=30, show_default=True, help="Rows of the state pool."
)
@click.option(
    "--draft", type=click.IntRange(min=0), default=3, show_default=True, help="Tokens of the longest draft."
)
@click.option(
    "--longest", type=click.IntRange(min=1), default=13, show_default=True,
    help="Tokens of the longest prefill chunk.",
)  # fmt: skip
@click.option(
    "--checkpoints/--no-checkpoints", default=True, show_default=True,
    help="Whether calls leave checkpoints behind, so that a state moves to another slot.",
)  # fmt: skip
@click.option("--k-heads", type=click.IntRange(min=1), help="Key heads. Default: 1.")
@click.option("--v-heads", type=click.IntRange(min=1), help="Value heads. Default: 2.")
@click.option("--dims", metavar="K,V", help="Head dimensions. Default: 64,64 (reference: 8,8).")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of q, k, v and beta.")
@click.option(
    "--state-dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32",
    show_default=True, help="Of the state pool.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(file_okay=False), metavar="DIR",
    help="Also write report.json, report.txt and the shortest history that fails.",
)  # fmt: skip
@device_option
@time_limit_option
@seed_option
@json_option
def life(
    kernels: tuple[str, ...],
    decode: str | None,
    verify: str | None,
    conv: str | None,
    conv_update: str | None,
    bookkeeper: str,
    steps: int,
    history: str | None,
    slots: int,
    draft: int,
    longest: int,
    checkpoints: bool,
    k_heads: int | None,
    v_heads: int | None,
    dims: str | None,
    dtype: str | None,
    state_dtype: str,
    out: str | None,
    device: str,
    time_limit: float,
    seed: int,
    as_json: bool,
) -> int:
    """Run the life of states: sequences arrive, are prefilled, decoded, verified, preempted, resumed.

    Every step is checked against each sequence's own truth and against a ledger of the slots: what is read is
    the sequence's own last write, its position the tokens seen, and slots that nobody owns keep their bits. A
    failure is shrunk to the shortest history that shows it.

    \b
    Example: gdncheck life --kernel vllm.chunk@0.19.1 --decode vllm.recurrent@0.19.1 --steps 2000 --seed 1
    Example: gdncheck life --bookkeeper my_engine.slots:Bookkeeper --out found
    """
    from gdncheck.cli.progress import Progress
    from gdncheck.compare.life.life import life as run_life
    from gdncheck.compare.life.report import dumps, print_report, write_report

    with Progress() as say:
        report = run_life(
            kernels or None, decode=decode, verify=verify, conv=conv, conv_update=conv_update,
            bookkeeper=bookkeeper, steps=steps, history=history, slots=slots, draft=draft, longest=longest,
            checkpoints=checkpoints, k_heads=k_heads, v_heads=v_heads, dims=_dims(dims), dtype=dtype,
            state_dtype=state_dtype, device=device, time_limit=time_limit, seed=seed, progress=say,
            command=command_line(click.get_current_context()),
        )  # fmt: skip
    if out is not None:
        write_report(report, Path(out))
    if as_json:
        click.echo(dumps(report))
    else:
        print_report(report, report_console())
    status: int = report.exit_status
    return status
