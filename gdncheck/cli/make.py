"""`gdncheck make FAMILY -o FILE`: a synthetic case file. The library twin is capture.make.make."""

from __future__ import annotations

from typing import Any

import click


class Integers(click.ParamType):  # type: ignore[type-arg]  # click before 8.3 takes no argument here
    """Comma-separated integers."""

    name = "n,n,..."

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no comma-separated list of integers", param, ctx)


def print_families(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """`--list`: one paragraph per family, then stop."""
    if not wanted or ctx.resilient_parsing:
        return
    from gdncheck.capture.make import FAMILIES

    for name, family in FAMILIES.items():
        click.echo(f"{name}: {family.summary}")
        click.echo(f"    keys: {family.keys}\n    g: {family.gate}\n    beta: {family.beta}")
    ctx.exit()


@click.command()
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=print_families,
    help="Print the families with their distributions.",
)
@click.argument("family")
@click.option("-o", "--output", required=True, type=click.Path(), metavar="FILE", help="Case file to write.")
@click.option(
    "--lengths",
    type=Integers(),
    default="40,1,63",
    show_default=True,
    help="Tokens per sequence; 0 is allowed.",
)
@click.option("--k-heads", type=int, default=2, show_default=True, help="Key heads.")
@click.option(
    "--v-heads", type=int, default=4, show_default=True, help="Value heads, a multiple of --k-heads."
)
@click.option("--dims", type=Integers(), default="64,64", show_default=True, help="K,V.")
@click.option("--dtype", default="bf16", show_default=True, help="Of q, k, v: bf16, fp16 or fp32.")
@click.option("--beta-dtype", default=None, help="Of beta; default: as --dtype.")
@click.option(
    "--state",
    default="none",
    show_default=True,
    help="none, zeros, random or stale; or one word per sequence, comma-separated.",
)
@click.option("--state-dtype", default="fp32", show_default=True, help="Of the initial state.")
@click.option(
    "--qk",
    type=click.Choice(["raw", "normalised"]),
    help="Whether q and k still need l2norm; default: as the family has them.",
)
@click.option(
    "--draft",
    type=click.IntRange(min=0),
    metavar="N",
    help="Make a verify step: up to 1 + N tokens per sequence, on as many columns of slots.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of every random choice.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def make(
    family: str,
    output: str,
    lengths: tuple[int, ...],
    k_heads: int,
    v_heads: int,
    dims: tuple[int, ...],
    dtype: str,
    beta_dtype: str | None,
    state: str,
    state_dtype: str,
    qk: Any,
    draft: int | None,
    seed: int,
    as_json: bool,
) -> None:
    """Write a synthetic case of FAMILY; the same arguments and seed give the same file content anywhere.

    Example: gdncheck make exact -o exact.safetensors --lengths 40,1,63 --state random --seed 1
    """
    from gdncheck.capture.casefile import bytes_on_disk, write_case
    from gdncheck.capture.make import make as make_case

    case = make_case(
        family, lengths=lengths, k_heads=k_heads, v_heads=v_heads, dims=dims, dtype=dtype, state=state,  # type: ignore[arg-type]
        seed=seed, beta_dtype=beta_dtype, state_dtype=state_dtype, qk=qk, draft=draft,
    )  # fmt: skip
    path = write_case(case, output)
    if as_json:
        import json

        click.echo(json.dumps({"schema": 1, "path": str(path), "content_hash": case.content_hash}))
        return
    click.echo(
        f"{path}: {family}, {case.n_tokens} tokens in {case.n_sequences} sequences, "
        f"{bytes_on_disk(case) / 1e6:.1f} MB, hash {case.content_hash[:12]}"  # type: ignore[index]
    )
