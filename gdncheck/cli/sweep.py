"""`gdncheck sweep`: which configuration first gives a non-finite or a wrong result, and which change does it.

The library twin is compare.sweep.sweep.sweep.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from gdncheck.cli.options import captures_option, lengths_of, run_options, tuning_options
from gdncheck.cli.repeat import command_line
from gdncheck.cli.terminal import report_console

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
# Seconds between two lines of progress where stderr is no terminal.
QUIET = 15.0
WIDTH = 100


class Duration(click.ParamType):  # type: ignore[type-arg]
    """`90`, `90s`, `10m`, `1.5h`: seconds above 0."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(value).strip())
        if match is None or float(match[1]) == 0:
            self.fail(f"{value!r} is no time; write 90s, 10m or 1.5h", param, ctx)
        return float(match[1]) * UNITS[match[2]]


def axes_of(words: tuple[str, ...]) -> dict[str, list[str]]:
    """{axis: values} of `name=v1,v2` words; one axis may come several times."""
    found: dict[str, list[str]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not equals:
            raise click.UsageError(f"--axis {word!r} has no value; write --axis split=at-64,at-65")
        found.setdefault(name.strip(), []).extend(v.strip() for v in values.split(",") if v.strip())
    return found


def names_of(words: tuple[str, ...]) -> list[str]:
    """Names of comma lists."""
    return [name.strip() for word in words for name in word.split(",") if name.strip()]


class Telling:
    """Progress on stderr: a bar on a terminal, else a line now and then, with the time left."""

    def __init__(self) -> None:
        from gdncheck.cli.progress import Progress

        self._bar = Progress()
        self._last = time.monotonic()

    def __enter__(self) -> Telling:
        self._bar.__enter__()
        return self

    def __call__(self, text: str, done: int = 0, total: int | None = None) -> None:
        self._bar(text, done, total)
        now = time.monotonic()
        if not sys.stderr.isatty() and now - self._last >= QUIET:
            self._last = now
            click.echo(text, err=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)


@click.command()
@click.argument("case", required=False, type=click.Path())
@click.option("--layer", type=click.IntRange(min=0), metavar="N", help="All captured calls of this layer.")
@captures_option
@click.option("--first", type=click.IntRange(min=1), metavar="N", help="Only the first N tokens of the case.")
@click.option(
    "--axis", "axes", multiple=True, metavar="NAME=V1,V2",
    help="Values of an axis in place of its own, repeatable.",
)  # fmt: skip
@click.option("--only", multiple=True, metavar="A,B", help="Only these axes.")
@click.option("--except", "excepted", multiple=True, metavar="A,B", help="All axes but these.")
@click.option(
    "--baseline", metavar="NAME|FILE",
    help="What production runs: vllm-0.19, vllm-0.33, sglang, hf, or a TOML file.",
)  # fmt: skip
@click.option(
    "--depth", type=click.Choice(["1", "2", "full"]), default="1", show_default=True,
    help="Single changes, pairs by a covering array, or the full product.",
)  # fmt: skip
@click.option(
    "--pin-runs", type=click.IntRange(min=1), metavar="N",
    help="Runs of every autotune pin, all judged.  [default: 5 on a GPU, 1 in the interpreter]",
)  # fmt: skip
@tuning_options
@click.option("--budget", type=Duration(), metavar="TIME", help="Begin nothing after this: 90s, 10m, 1h.")
@click.option("--out", type=click.Path(file_okay=False), metavar="DIR", help="Write results as they come.")
@click.option("--resume", is_flag=True, help="Go on with the run in --out.")
@run_options
def sweep(
    case: str | None,
    layer: int | None,
    captures: str,
    first: int | None,
    axes: tuple[str, ...],
    only: tuple[str, ...],
    excepted: tuple[str, ...],
    baseline: str | None,
    depth: str,
    pin_runs: int | None,
    tunings: int,
    tuned_at: str,
    budget: float | None,
    out: str | None,
    resume: bool,
    kernels: tuple[str, ...],
    device: str,
    time_limit: float,
    seed: int,
    strict: bool,
    as_json: bool,
) -> int:
    """Try configurations on CASE or on a captured layer, fewest deviations from the baseline first.

    The first non-finite and the first wrong one are confirmed in a fresh process, reduced to the changes that
    matter, and shown beside the nearest configuration that passes. Axes: chunk_size, split, packing, state,
    state_dtype, input_dtype, beta_dtype, g_dtype, rounding, l2norm, autotune, memory, heads, repeat.

    \b
    Example: gdncheck sweep --layer 17 --kernel fla.chunk
    Example: gdncheck sweep case.safetensors --axis split=at-64,at-65 --only split,state_dtype --depth 2
    Example: gdncheck sweep --layer 17 --baseline vllm-0.19 --budget 10m --out runs/night
    Example: gdncheck sweep --layer 17 --kernel vllm.chunk@0.19.1 --only autotune --pin-runs 40 --tunings 20
    """
    if case is not None and layer is not None:
        raise click.UsageError(f"give a case or --layer {layer}, not both")
    from gdncheck.compare.sweep.sweep import sweep as run_sweep

    with Telling() as say:
        report = run_sweep(
            case,
            kernels=kernels or None,
            layer=layer,
            captures=captures,
            first=first,
            axes=axes_of(axes),
            only=names_of(only),
            excepted=names_of(excepted),
            baseline=baseline,
            depth=depth,
            pin_runs=pin_runs,
            tunings=tunings,
            tuned_at=lengths_of(tuned_at),
            budget=budget,
            device=device,
            time_limit=time_limit,
            seed=seed,
            strict=strict,
            out=out,
            resume=resume,
            progress=say,
            command=command_line(click.get_current_context()),
        )
    _print(report, as_json=as_json, out=out)
    return int(report.exit_status)


def _print(report: Any, *, as_json: bool, out: str | None) -> None:
    """The report on stdout, and in files where asked."""
    from gdncheck.compare.sweep.jsonout import dumps
    from gdncheck.compare.sweep.report import print_report, write_report

    if as_json:
        click.echo(dumps(report))
    else:
        print_report(report, report_console(WIDTH))
    if out is not None:
        write_report(report, Path(out))
