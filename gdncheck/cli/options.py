"""Options that several commands share, declared once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]

device_option = click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
    help="Where kernels run; cpu means Triton's interpreter.",
)  # fmt: skip
kernel_option = click.option(
    "--kernel", "kernels", multiple=True, metavar="NAME",
    help="Kernel under test, repeatable: fla.chunk, fla.chunk@0.6.0, fla.chunk@path:DIR, fla.chunk@git:REV, "
    "package.module:function. Default: what is installed.",
)  # fmt: skip


def time_limit_of(seconds: float) -> Decorator:
    """`--time-limit` with this default."""
    return click.option(
        "--time-limit", type=click.FloatRange(min=0, min_open=True), default=seconds, show_default=True,
        metavar="SECONDS", help="Limit for one kernel call, compile included.",
    )  # fmt: skip


time_limit_option = time_limit_of(300.0)
seed_option = click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of every random choice."
)
strict_option = click.option(
    "--strict", is_flag=True, help="Count suspects and contract differences as failures (exit 1)."
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
captures_option = click.option(
    "--captures", type=click.Path(file_okay=False), envvar="GDNCHECK_CAPTURES", default="captures",
    show_default=True, help="Directory of captured cases.",
)  # fmt: skip

first_option = click.option(
    "--first", type=click.IntRange(min=1), metavar="N",
    help="Judge the first N tokens of the first sequence only (for kernels that are slow here).",
)  # fmt: skip

cache_option = click.option(
    "--cache", "cache_dir", type=click.Path(file_okay=False), envvar="GDNCHECK_CACHE", metavar="DIR",
    help="Directory of fetched versions. Default: $GDNCHECK_CACHE, else ~/.cache/gdncheck.",
)  # fmt: skip


def _use_sources(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> None:
    """The clones hold for the whole command; `meta` keeps them for the command that repeats it."""
    from gdncheck.kernels.checkout import sources_of, use_sources

    use_sources(sources_of(words))
    context.meta["gdncheck.source"] = words


source_option = click.option(
    "--source", multiple=True, metavar="FAMILY=DIR", expose_value=False, callback=_use_sources,
    help="Clone that FAMILY.OP@git:REV is taken from, repeatable: fla=../flash-linear-attention.",
)  # fmt: skip


class Lengths(click.ParamType):  # type: ignore[type-arg]
    """`16,32,64`: numbers of tokens; kept as typed."""

    name = "lengths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        words = str(value).split(",")
        if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
            self.fail(f"{value!r}: write numbers of tokens with commas, as 16,32,64", param, ctx)
        return ",".join(word.strip() for word in words)


def lengths_of(text: str) -> list[int]:
    """Numbers of a checked `16,32,64`."""
    return [int(word) for word in text.split(",")]


def tuning_options(command: Command) -> Command:
    """How often tuners are asked again, and where."""
    for option in (
        click.option(
            "--tuned-at", type=Lengths(), default="16,32,64", show_default=True, metavar="N,N",
            help="Tokens at which the fresh tunings are made, beside the case's own length.",
        ),
        click.option(
            "--tunings", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
            help="On a GPU, count what the tuners pick in so many fresh tunings at each length.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def run_options(command: Command, *, time_limit: Decorator = time_limit_option) -> Command:
    """The options of every command that runs kernels. time_limit: for another default than 300 s."""
    options = (
        json_option, strict_option, seed_option, time_limit, device_option, source_option, kernel_option,
    )  # fmt: skip
    for option in options:
        command = option(command)
    return command
