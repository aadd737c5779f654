"""`gdncheck decode CASE`: thousands of steps through the state; the library twin is compare.decode.drift."""

from __future__ import annotations

from typing import Any

import click

from gdncheck.cli.options import run_options
from gdncheck.cli.repeat import command_line
from gdncheck.cli.terminal import report_console


@click.command()
@click.argument("case", type=click.Path())
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=None,
    metavar="N",
    help="Tokens to decode per sequence, the case's own repeated in order (4096); or verify steps (8).",
)
@click.option(
    "--state-dtype",
    "state_dtypes",
    multiple=True,
    metavar="DTYPE",
    help="Keep the state in this dtype between steps: fp32, bf16, fp16; repeatable.",
)
@click.option(
    "--beta-dtype",
    "beta_dtypes",
    multiple=True,
    metavar="DTYPE",
    help="Give beta in this dtype; repeatable. Default: as the case has it.",
)
@click.option(
    "--l2norm",
    multiple=True,
    type=click.Choice(["in_kernel", "before"]),
    help="For raw q and k: normalised in the kernel, or before it and rounded; repeatable.",
)
@click.option(
    "--whole",
    is_flag=True,
    help="One call per checkpoint instead of one per token: the drift of a prefill.",
)
@click.option(
    "--draft",
    type=click.IntRange(min=1),
    metavar="N",
    help="Decode by speculative steps: drafts of 1 to N tokens, of which none to all are accepted.",
)
@run_options
def decode(
    case: str,
    steps: int | None,
    state_dtypes: tuple[str, ...],
    beta_dtypes: tuple[str, ...],
    l2norm: tuple[Any, ...],
    whole: bool,
    draft: int | None,
    kernels: tuple[str, ...],
    device: str,
    time_limit: float,
    seed: int,
    strict: bool,
    as_json: bool,
) -> int:
    """Decode CASE token by token and follow the error of the state against the float64 recurrence.

    Every combination of the rounding options is one line: the relative error at each checkpoint, what an
    honest kernel errs under the same rounding, and the bound that the declared dtypes give.

    \b
    Example: gdncheck decode case.safetensors --steps 4096 --state-dtype fp32 --state-dtype bf16
    Example: gdncheck decode case.safetensors --kernel vllm.verify@0.33.0 --draft 3
    """
    if draft is not None:
        if whole or beta_dtypes or l2norm:
            raise click.UsageError("--draft goes with --steps and --state-dtype only")
        return _drafts(
            case, draft, steps or 8, state_dtypes, kernels, device, time_limit, seed, strict, as_json
        )
    from gdncheck.cli.progress import Progress
    from gdncheck.compare.decode.drift import decode as run_decode
    from gdncheck.compare.decode.report import dumps, print_report

    with Progress() as say:
        report = run_decode(
            case,
            kernels=kernels or None,
            steps=steps or 4096,
            state_dtypes=state_dtypes,
            beta_dtypes=beta_dtypes,
            l2norm=l2norm,
            whole=whole,
            device=device,
            time_limit=time_limit,
            seed=seed,
            strict=strict,
            progress=say,
            command=command_line(click.get_current_context()),
        )
    if as_json:
        click.echo(dumps(report))
    else:
        print_report(report, report_console())
    return report.exit_status


def _drafts(
    case: str, draft: int, steps: int, state_dtypes: tuple[str, ...], kernels: tuple[str, ...], device: str,
    time_limit: float, seed: int, strict: bool, as_json: bool,
) -> int:  # fmt: skip
    """The run with drafts; its library twin is compare.verify.drafted."""
    from gdncheck.cli.progress import Progress
    from gdncheck.compare.verify.drafted import decode_drafts, dumps, print_report

    with Progress() as say:
        report = decode_drafts(
            case, kernels=kernels, draft=draft, steps=steps, state_dtypes=state_dtypes, device=device,
            time_limit=time_limit, seed=seed, strict=strict, progress=say,
            command=command_line(click.get_current_context()),
        )  # fmt: skip
    if as_json:
        click.echo(dumps(report))
    else:
        print_report(report, report_console())
    return report.exit_status
