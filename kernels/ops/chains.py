"""Chains: which kernels make the core of a layer in each family, in the order in which they run.

The idea: `fla.core` is no kernel of its own but conv, l2norm, gate, rule and norm of one family, each in its
worker; a name may put another kernel in the place of one, `fla.core,norm=my_norms:norm`. A family that runs
its core as one call (transformers' layer) has an adapter of that name, which shows what it computed.

Leaves to others: running and judging the chain (`compare.ops.chain`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ...capture.errors import BadInput
from .. import registry
from ..cache import version_key
from ..protocol import KernelSpec
from .signature import RULE_OPS

ORDER = ("conv", "split", "post-conv", "l2norm", "gate", "rule", "norm")
# Operation -> kernel of the same family, unless one is named. A family without l2norm has it in its rule,
# which takes q and k raw.
CHAINS: dict[str, dict[str, str]] = {
    "emulation": {
        "conv": "conv", "split": "split", "l2norm": "l2norm", "gate": "gate", "rule": "chunk", "norm": "norm",
    },
    "fla": {
        "conv": "conv", "split": "emulation.split", "l2norm": "l2norm", "gate": "gate", "rule": "chunk",
        "norm": "norm",
    },
    "vllm": {"conv": "conv", "post-conv": "post-conv", "rule": "chunk", "norm": "norm"},
    "vllm-cpu": {
        "conv": "conv", "split": "emulation.split", "gate": "gate", "rule": "chunk", "norm": "emulation.norm",
    },
}  # fmt: skip
FIRST_VLLM = {
    "conv": "conv", "split": "emulation.split", "l2norm": "l2norm", "gate": "gate", "rule": "chunk",
    "norm": "norm",
}  # fmt: skip
PREPARES_SINCE = "0.20.0"
PREPARES_FILE = "fused_gdn_prefill_post_conv.py"


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """The kernels of one core."""

    name: str
    steps: tuple[tuple[str, KernelSpec], ...]
    """(operation, kernel) in order; ("core", kernel) alone for a core that is one call."""


def is_chain(text: str) -> bool:
    """Whether a kernel's name means a chain or a whole core."""
    first = text.partition(",")[0].strip()
    return "," in text or first.partition("@")[0].endswith(".core")


def chain_of(
    text: str, *, cache_dir: Path | str | None = None, sources: Mapping[str, str] | None = None
) -> Chain:
    """Read `family.core[@where][,op=kernel ...]`, or `module:function` for a core that is one call.

    Raises BadInput for a wrong name, CannotRun for a kernel whose package is not here.
    """
    first, *others = (part.strip() for part in text.split(","))
    replaced = dict(_replacement(text, part) for part in others)

    def resolved(name: str, op: str) -> KernelSpec:
        spec = registry.resolve(name, cache_dir=cache_dir, sources=sources)
        if not spec.by_import_path:
            return spec
        return msgspec.structs.replace(spec, op="rule" if op in RULE_OPS else op)

    parsed = registry.parse_name(first)
    if parsed.module is not None or parsed.family not in CHAINS:
        if replaced:
            raise BadInput(f"{text}: {first} is one call; no operation of it can be replaced")
        return Chain(name=first, steps=(("core", resolved(first, "core")),))
    if parsed.op != "core":
        raise BadInput(f"{text}: --op core takes FAMILY.core, as {parsed.family}.core, not {first}")
    at = str(parsed).partition("@")[2]
    table = _table(first, parsed, cache_dir, sources)
    steps = []
    for op in ORDER:
        if op in replaced:
            steps.append((op, resolved(replaced[op], op)))
        elif op in table:
            steps.append((op, resolved(_named(parsed.family, table[op], at), op)))
    names = [op for op, _ in steps]
    if "post-conv" in names and {"split", "l2norm", "gate"} & set(names):
        raise BadInput(f"{text}: post-conv is split, l2norm and gate in one; replace post-conv itself")
    version = next((spec.version for op, spec in steps if op == "rule"), None)
    label = f"{parsed.family}.core" + (f"@{at or version}" if at or version else "")
    return Chain(name=",".join([label, *others]), steps=tuple(steps))


def _replacement(text: str, part: str) -> tuple[str, str]:
    op, sign, name = part.partition("=")
    if not sign or op not in ORDER:
        raise BadInput(f"{text}: {part!r} is no OP=KERNEL; operations are {', '.join(ORDER)}")
    return op, name


def _named(family: str, kernel: str, at: str) -> str:
    if "." in kernel:
        return kernel
    return f"{family}.{kernel}" + (f"@{at}" if at else "")


def _table(
    first: str,
    parsed: registry.KernelName,
    cache_dir: Path | str | None,
    sources: Mapping[str, str] | None,
) -> dict[str, str]:
    """The family's chain; vLLM's was rebuilt with 0.20.0."""
    assert parsed.family is not None
    if parsed.family != "vllm":
        return CHAINS[parsed.family]
    rule = registry.resolve(first.replace(".core", ".chunk", 1), cache_dir=cache_dir, sources=sources)
    if rule.version is not None:
        second = version_key(rule.version) >= version_key(PREPARES_SINCE)
    else:
        second = any(any(Path(folder).rglob(PREPARES_FILE)) for folder in rule.sys_path)
    return CHAINS["vllm"] if second else FIRST_VLLM
