"""`gdncheck inspect CASE`: what a case holds, is its input sound. Twin: compare.inspect.inspect."""

from __future__ import annotations

import time
from typing import Any

import click


@click.command()
@click.argument("case", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def inspect(case: str, as_json: bool) -> None:
    """Look at CASE without running a kernel: shapes, domain check, statistics, predicted overflow.

    Unsound input is reported, not an error: the exit status is 0 for every readable case.

    Example: gdncheck inspect captures/layer017.call0000.safetensors
    """
    from gdncheck.capture.casefile import read_case
    from gdncheck.compare.inspect import inspect as inspect_case

    started = time.monotonic()
    report = inspect_case(read_case(case))
    if as_json:
        import json

        import msgspec

        from gdncheck.compare.inspect import SCHEMA
        from gdncheck.compare.jsonout import plain_numbers

        document = plain_numbers({"schema": SCHEMA, **msgspec.to_builtins(report)})
        click.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    show(report)
    verdict = "input sound" if report.sound else "input not sound"
    click.echo(
        f"{verdict} in {time.monotonic() - started:.1f} s: gdncheck inspect {click.format_filename(case)}"
    )


def show(report: Any) -> None:
    """The report as text on stdout."""
    lengths = ", ".join(map(str, report.lengths[:8])) + (", ..." if len(report.lengths) > 8 else "")
    count = len(report.lengths)
    sequences = f"{count} sequence{'s' * (count != 1)}"
    click.echo(f"{report.case}: op {report.op}, {report.tokens} tokens in {sequences} ({lengths})")
    origin = ", ".join(f"{key} {value}" for key, value in report.origin.items())
    click.echo(f"  {origin}; {report.bytes / 1e6:.1f} MB; hash {(report.content_hash or 'none')[:12]}")
    options = ", ".join(f"{key} {value}" for key, value in report.options.items() if value is not None)
    click.echo(f"  called with {options}")
    for row in report.tensors:
        bad = f"  {row.nonfinite} not finite" if row.nonfinite else ""
        click.echo(f"  {row.name:18} {row.dtype:9} {row.shape!s:22} {row.bytes / 1e6:9.3f} MB{bad}")
    if report.statistics:
        names = list(next(iter(report.statistics.values())))
        click.echo(f"  {'quantiles':12}" + "".join(f"{name:>11}" for name in names))
        for name, values in report.statistics.items():
            click.echo(f"  {name:12}" + "".join(f"{value:11.3g}" for value in values.values()))
    size = report.overflow["chunk_size"]
    told = "at no chunk size up to 128" if size is None else f"from chunk size {size} on"
    click.echo(f"  a kernel that factors exp(G_i) exp(-G_j) overflows {told}")
    for finding in report.findings:
        click.echo(f"  {finding['severity']}: {finding['text']}")
