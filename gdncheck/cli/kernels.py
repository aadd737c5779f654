"""`gdncheck kernels`: which kernels there are, versions side by side, what each promises, who changed it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .kernels_bisect import bisect
from .options import cache_option, device_option, json_option

if TYPE_CHECKING:
    from gdncheck.kernels.cache import CachedVersion
    from gdncheck.kernels.inventory import KernelStatus


@click.group()
def kernels() -> None:
    """List kernels, fetch their versions side by side, print their contracts.

    Example: gdncheck kernels list
    """


kernels.add_command(bisect)


@kernels.command("list")
@click.option("--try", "try_them", is_flag=True, help="Load each kernel in a process of its own.")
@device_option
@cache_option
@json_option
def list_kernels(try_them: bool, device: str, cache_dir: str | None, as_json: bool) -> int:
    """Show known kernels: installed and cached versions, sizes, and why one cannot run here.

    Example: gdncheck kernels list --try
    """
    from gdncheck.kernels import cache
    from gdncheck.kernels.inventory import inventory, try_out

    statuses = inventory(cache_dir)
    if try_them:
        statuses = try_out(statuses, device=device, cache_dir=cache_dir)
    records = cache.cached(cache_dir)
    if as_json:
        import msgspec

        document = {
            "schema": 1,
            "kernels": statuses,
            "cache": str(cache.cache_root(cache_dir)),
            "cached": records,
        }
        click.echo(msgspec.json.encode(document).decode())
        return 0
    for line in _kernel_lines(statuses):
        click.echo(line)
    click.echo(f"cache {cache.cache_root(cache_dir)}: {_sum(records)}")
    for record in records:
        click.echo(f"  {_cached_line(record)}")
    return 0


@kernels.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME@VERSION...")
@click.option(
    "--from-wheel",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Take it from a wheel on disk: no network.",
)
@cache_option
@json_option
def fetch(names: tuple[str, ...], from_wheel: str | None, cache_dir: str | None, as_json: bool) -> int:
    """Put versions of kernels into the cache through pip: the kernels only, no dependencies.

    Example: gdncheck kernels fetch fla@0.6.0
    """
    from gdncheck.capture.errors import BadInput
    from gdncheck.kernels import cache

    if from_wheel is not None and len(names) > 1:
        raise BadInput("--from-wheel holds one version; give one NAME@VERSION with it")
    records = []
    for name in names:
        records.append(cache.fetch(name, cache_dir=cache_dir, from_wheel=from_wheel))
        if not as_json:
            click.echo(_cached_line(records[-1]))
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode({"schema": 1, "cached": records}).decode())
    else:
        click.echo(
            f"in {cache.cache_root(cache_dir)}; use it: gdncheck diff CASE --kernel {_usable(records[-1])}"
        )
    return 0


@kernels.command()
@click.argument("names", nargs=-1, metavar="[NAME[@VERSION]]...")
@click.option("--all", "everything", is_flag=True, help="Remove every version.")
@cache_option
def prune(names: tuple[str, ...], everything: bool, cache_dir: str | None) -> int:
    """Remove versions from the cache.

    Example: gdncheck kernels prune fla@0.6.0
    """
    from gdncheck.capture.errors import BadInput
    from gdncheck.kernels import cache

    if bool(names) == everything:
        raise BadInput("name what to remove, for example fla@0.6.0, or give --all")
    removed = cache.prune(None if everything else list(names), cache_dir=cache_dir)
    for record in removed:
        click.echo(f"removed {record.family}@{record.version}")
    click.echo(f"freed {_sum(removed)}")
    return 0


@kernels.command()
@click.argument("name")
@json_option
def contract(name: str, as_json: bool) -> int:
    """Print what a kernel promises: domain, transforms, rounding, relations.

    Example: gdncheck kernels contract fla.chunk@0.6.0
    """
    import msgspec

    from gdncheck.kernels.registry import contract_of

    found = contract_of(name)
    if as_json:
        click.echo(msgspec.json.encode({"schema": 1, **msgspec.to_builtins(found)}).decode())
        return 0
    click.echo(found.kernel)
    for clause in sorted(found.clauses, key=lambda clause: (clause.kind, clause.id)):
        span = " ".join(
            f"{word} {value}" for word, value in (("since", clause.since), ("until", clause.until)) if value
        )
        tail = f" ({span})" if span else ""
        click.echo(
            f"  {clause.kind:<9} {clause.id:<28} {clause.applies_to}: {clause.value}{tail} [{clause.source}]"
        )
    if not found.clauses:
        click.echo("  no clauses: judged against the pure truth")
    return 0


def _kernel_lines(statuses: list[KernelStatus]) -> list[str]:
    width = max((len(status.name) for status in statuses), default=0)
    lines = []
    for status in statuses:
        state = status.why_not or status.runs_on or "/".join(status.devices)
        lines.append(f"{status.name:<{width}}  {status.found:<13} {state}")
    return lines


def _cached_line(record: CachedVersion) -> str:
    tested = "tested" if record.pinned else "not among the tested versions"
    name = f"{record.family}@{record.version}"
    return f"{name:<14} {_size(record.bytes)}, {record.n_files} files of {record.wheel}, {tested}"


def _usable(record: CachedVersion) -> str:
    return f"{record.family}.chunk@{record.version}"


def _sum(records: list[CachedVersion]) -> str:
    versions = "1 version" if len(records) == 1 else f"{len(records)} versions"
    return f"{versions}, {_size(sum(record.bytes for record in records))}"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB"
