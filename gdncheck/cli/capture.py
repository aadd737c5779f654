"""`gdncheck capture MODEL`: run a checkpoint on frozen tokens and keep what its GDN layers were handed.

The library twin is capture.run.capture.
"""

from __future__ import annotations

from typing import Any

import click

from gdncheck.cli.repeat import command_line


class Lengths(list[int]):
    """Lengths that print as they were typed, so that the repeating command can be copied."""

    def __str__(self) -> str:
        return ",".join(map(str, self)) + ("," if len(self) == 1 else "")


class Limit(tuple[str, str]):
    """(device, size) that prints as typed."""

    def __str__(self) -> str:
        return "=".join(self)


class Split(click.ParamType):  # type: ignore[type-arg]
    """`2048` (every 2048 tokens) or `64,65` (these lengths, then the rest)."""

    name = "n|n,n,..."

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | Lengths:
        try:
            lengths = Lengths(int(part) for part in str(value).rstrip(",").split(","))
        except ValueError:
            self.fail(f"{value!r} is no length and no comma-separated list of lengths", param, ctx)
        return lengths[0] if len(lengths) == 1 and "," not in str(value) else lengths


class Memory(click.ParamType):  # type: ignore[type-arg]
    """`cpu=20GiB`: the most that a device may hold of the model."""

    name = "device=size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Limit:
        device, equals, size = str(value).partition("=")
        if not (device and equals and size):
            self.fail(f"{value!r} is no DEVICE=SIZE such as cpu=20GiB", param, ctx)
        return Limit((device, size))


@click.command()
@click.argument("model", type=click.Path())
@click.option(
    "--tokens", required=True, type=click.Path(), metavar="FILE",
    help="Token ids as JSON (a list, or one list per prefill call), or a .txt for the model's tokenizer.",
)  # fmt: skip
@click.option(
    "--layer", "layers", multiple=True, required=True, metavar="N|N-M|all",
    help="GDN layer to capture, 0-based; repeatable, and commas and ranges are understood.",
)  # fmt: skip
@click.option(
    "--what", type=click.Choice(["rule", "core"]), default="core", show_default=True,
    help="rule: q, k, v, g, beta, states and output; core: also what conv, gate and norm were given.",
)  # fmt: skip
@click.option(
    "--split", type=Split(), metavar="N|N,N,...",
    help="Cut the prefill every N tokens, or into these lengths and the rest. Default: one call.",
)  # fmt: skip
@click.option(
    "--decode", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
    help="Generate N tokens greedily after the prefill, one call each.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(file_okay=False), envvar="GDNCHECK_CAPTURES", default="captures", metavar="DIR",
    show_default=True, help="Directory for the cases; earlier calls of the same layers are replaced.",
)  # fmt: skip
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
    help="Where the model runs.",
)  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(["auto", "bfloat16", "float16", "float32"]), default="auto",
    show_default=True, help="Data type to load the model in; auto: as stored.",
)  # fmt: skip
@click.option(
    "--early-stop", is_flag=True,
    help="Neither load nor run what lies behind the last layer asked for; the logits are then not checked.",
)  # fmt: skip
@click.option(
    "--device-map", metavar="MAP",
    help="For a model larger than memory: disk (every block stays on disk until it runs), auto, balanced, "
    "sequential, a device, or a JSON file (needs accelerate).",
)  # fmt: skip
@click.option(
    "--offload-folder", type=click.Path(file_okay=False), metavar="DIR",
    help="Where --device-map keeps weights that it has to rewrite; default: inside --out while running.",
)  # fmt: skip
@click.option(
    "--max-memory", type=Memory(), multiple=True, metavar="DEVICE=SIZE",
    help="Limit for --device-map auto, repeatable: cpu=20GiB, 0=10GiB.",
)  # fmt: skip
@click.option(
    "--backend", type=click.Choice(["auto", "torch", "installed"]), default="auto", show_default=True,
    help="Rule that transformers uses: its torch code, or the installed fla; auto: torch on a CPU.",
)  # fmt: skip
@click.option(
    "--sys-path", multiple=True, type=click.Path(exists=True, file_okay=False), metavar="DIR",
    help="Put DIR first on the model process's import path, e.g. another transformers; repeatable.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def capture(
    model: str, tokens: str, layers: tuple[str, ...], what: str, split: int | list[int] | None, decode: int,
    out: str, device: str, dtype: str, early_stop: bool, device_map: str | None, offload_folder: str | None,
    max_memory: tuple[tuple[str, str], ...], backend: str, sys_path: tuple[str, ...], as_json: bool,
) -> int:  # fmt: skip
    """Run MODEL on frozen tokens; write one case per GDN layer and call, and check the logits.

    MODEL is a Hugging Face checkpoint directory (Qwen3-Next, Qwen3.5, Qwen3.5-MoE), or OWNER/NAME in the
    local cache. Every weight of the captured layers is compared with the files. Exit status 1: logits,
    weights or a layer's inputs are not finite, or a weight differs from the file.

    \b
    Example: gdncheck capture models/tiny-qwen35moe --tokens examples/tokens200.json --layer 17
    Example: gdncheck capture Qwen/Qwen3.5-35B-A3B --tokens ids.json --layer 17 --early-stop --device-map disk
    Example: gdncheck capture DIR --tokens ids.json --layer 0-2 --split 2048 --decode 4 --what rule
    """
    from pathlib import Path

    from gdncheck.capture.plan import describe
    from gdncheck.capture.run import capture as run_capture
    from gdncheck.cli.progress import Progress

    with Progress() as say:
        result = run_capture(
            model, tokens=tokens, layers=list(layers), out=out, what=what, split=split, decode=decode,  # type: ignore[arg-type]
            device=device, dtype=dtype, early_stop=early_stop, device_map=device_map,  # type: ignore[arg-type]
            offload_folder=offload_folder, max_memory=dict(max_memory), backend=backend, sys_path=sys_path,  # type: ignore[arg-type]
            on_plan=lambda plan: click.echo(f"capture: {describe(plan, Path(out))}", err=True), progress=say,
        )  # fmt: skip
    if as_json:
        import json

        click.echo(json.dumps(result.document()))
    else:
        _print(result, out)
    return 0 if result.verdict == "pass" else 1


def _print(result: Any, out: str) -> None:
    """What was written and what the control says; the last line is the verdict."""
    from gdncheck.capture.plan import size

    for case in result.cases:
        note = "" if case.finite else ", NOT FINITE"
        click.echo(f"{case.path}: {case.phase}, {case.n_tokens} tokens, {size(case.bytes)}{note}")
    click.echo(f"ran: {result.engine}, {result.model_class}, {', '.join(result.backends)}")
    click.echo(f"control: {result.reason}")
    where = "" if out == "captures" else f" --captures {out}"
    click.echo(f"next: gdncheck diff --layer {result.layers[-1]}{where}")
    click.echo(f"{result.verdict}, {result.seconds:.1f} s: {command_line(click.get_current_context())}")
