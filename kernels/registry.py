"""Kernel names: what `family.op[@where]` or `module:function` means, and which kernels there are.

The idea: a name is resolved to a `KernelSpec`, plain data that a worker can load, without importing the
kernel's package here. Families come from the table of our own adapters and from the entry-point group
`gdncheck.kernels`, whose modules hold `KERNELS = {op: adapter class}`. An adapter class has
`capabilities`, `package` (the distribution whose installed version it is, or None),
`contract_for(version)`, optionally `environment`; it is made with `version=` and has describe() and run().

Leaves to others: what a version's directory is (`cache`), loading (`worker`).
"""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from ..capture.errors import BadInput, CannotRun
from . import cache
from .contract import Contract
from .ops.signature import RULE_OPS, SIGNATURES
from .protocol import KernelSpec

ENTRY_POINT_GROUP = "gdncheck.kernels"
# Our own adapters; an entry point of the same name in another package is refused, not preferred.
OWN_FAMILIES = {
    "fla": "gdncheck.kernels.fla",
    "transformers": "gdncheck.kernels.transformers",
    "emulation": "gdncheck.kernels.emulation",
    "vllm": "gdncheck.kernels.vllm",
    "vllm-cpu": "gdncheck.kernels.vllm_cpu",
    "sglang": "gdncheck.kernels.sglang",
    "flashinfer": "gdncheck.kernels.flashinfer",
    "causal-conv1d": "gdncheck.kernels.ops.conv_cuda",
}
# Their operations around the rule, apart, so that a rule's kernel does not pay for importing them.
OWN_OPS: dict[str, tuple[str, ...]] = {
    "emulation": ("gdncheck.kernels.ops.emulation",),
    "fla": ("gdncheck.kernels.ops.fla", "gdncheck.kernels.ops.conv_fla"),
    "transformers": ("gdncheck.kernels.ops.transformers", "gdncheck.kernels.ops.conv_transformers"),
    "vllm": ("gdncheck.kernels.ops.vllm", "gdncheck.kernels.ops.conv_vllm"),
    "sglang": ("gdncheck.kernels.ops.sglang",),
    "vllm-cpu": ("gdncheck.kernels.ops.vllm_cpu", "gdncheck.kernels.ops.conv_vllm_cpu"),
}
# Families that may live in an environment of their own (`make engine-env`), because they pin other packages.
ENGINE_FAMILIES = ("vllm-cpu",)
ENGINE_ENVIRONMENT = ".venv-engine"
# What `gdncheck diff` runs when no kernel is named, where installed.
DEFAULT_FAMILIES = ("fla", "transformers")
OPS = (*RULE_OPS, *(op for op in SIGNATURES if op != "rule"))

REGISTERED = re.compile(r"(?P<family>[a-z][a-z0-9_-]*)\.(?P<op>[a-z][a-z0-9_-]*)(?:@(?P<where>.+))?")
IMPORT_PATH = re.compile(
    r"(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<attribute>[^\W\d]\w*(?:\.[^\W\d]\w*)*)"
)
VERSION = re.compile(r"[0-9][A-Za-z0-9.+!_-]*")


class KernelName(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed name. Either family and op are set, or module and attribute."""

    family: str | None = None
    op: str | None = None
    version: str | None = None
    path: str | None = None
    """Directory of a working tree, from `@path:DIR`."""
    revision: str | None = None
    """Revision of a clone, from `@git:REV`."""
    module: str | None = None
    attribute: str | None = None

    def __str__(self) -> str:
        if self.module is not None:
            return f"{self.module}:{self.attribute}"
        where = self.version
        if self.path is not None:
            where = f"path:{self.path}"
        if self.revision is not None:
            where = f"git:{self.revision}"
        return f"{self.family}.{self.op}" + (f"@{where}" if where else "")


def parse_name(text: str) -> KernelName:
    """Read a kernel's name. Raises BadInput on anything that is not of one of the two forms."""
    text = text.strip()
    match = IMPORT_PATH.fullmatch(text)
    if match and not match["module"].endswith(".py"):
        return KernelName(module=match["module"], attribute=match["attribute"])
    if not (match := REGISTERED.fullmatch(text)):
        file, _, function = text.partition(":")
        hint = (
            f"; give the module, {Path(file).stem}:{function or 'function'}" if file.endswith(".py") else ""
        )
        raise BadInput(f"kernel name {text!r} is neither family.op[@where] nor module:function{hint}")
    family, op, where = match["family"], match["op"], match["where"]
    if where is None:
        return KernelName(family=family, op=op)
    if where.startswith("path:") and where != "path:":
        return KernelName(family=family, op=op, path=where.removeprefix("path:"))
    if where.startswith("git:") and where != "git:":
        return KernelName(family=family, op=op, revision=where.removeprefix("git:"))
    if VERSION.fullmatch(where):
        return KernelName(family=family, op=op, version=where)
    raise BadInput(f"kernel {text}: {where!r} is no version, path:DIR or git:REV")


def family_modules() -> dict[str, str]:
    """Family -> module of its adapters: our own and what other packages registered."""
    found = dict(OWN_FAMILIES)
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        found.setdefault(entry.name, entry.value.partition(":")[0])
    return found


def own_kernels() -> dict[str, Any]:
    """`family.op` -> adapter class of our own families. Imports no kernel's package."""
    return {
        f"{family}.{op}": adapter
        for family in OWN_FAMILIES
        for module in own_modules(family)
        for op, adapter in import_module(module).KERNELS.items()
    }


def own_modules(family: str) -> tuple[str, ...]:
    """The modules that hold one of our own families: the rule's first."""
    return (OWN_FAMILIES[family], *OWN_OPS.get(family, ()))


def module_of(family: str, op: str) -> str:
    """The module whose KERNELS a worker looks an operation up in."""
    for module in own_modules(family) if family in OWN_FAMILIES else ():
        if op in import_module(module).KERNELS:
            return module
    return family_modules()[family]


def known_names() -> list[str]:
    """What an error message offers: our own kernels, and `family.*` for those of other packages."""
    others = sorted(set(family_modules()) - set(OWN_FAMILIES))
    return [*sorted(own_kernels()), *(f"{family}.*" for family in others)]


def unknown_kernel(text: str) -> BadInput:
    """The error for a name that is not registered, with near matches."""
    names = known_names()
    stem = text.partition("@")[0]
    near = difflib.get_close_matches(stem, names, n=2, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return BadInput(f"unknown kernel {text}; {hint}known are {', '.join(names)}, or module:function")


def adapter_class(name: KernelName) -> Any | None:
    """The adapter class of one of our own kernels; None for a kernel of another package.

    Raises BadInput where the family is ours and has no such op, or no family of that name is known.
    """
    assert name.family is not None
    if name.family in OWN_FAMILIES:
        assert name.op is not None
        found = import_module(module_of(name.family, name.op)).KERNELS.get(name.op)
        if found is None:
            raise unknown_kernel(str(name))
        return found
    if name.family not in family_modules():
        raise unknown_kernel(str(name))
    return None


def installed_version(package: str | None) -> str | None:
    """Version of an installed distribution, read without importing it."""
    if package is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return engine_version(package)


def python_for(family: str, cached: bool = False) -> str | None:
    """Interpreter that a family's workers run in: $GDNCHECK_PYTHON_FAMILY, or its own environment's.

    cached: the version comes from the cache, which needs no environment of its own. The engine
    environment is looked for in the current directory and beside gdncheck itself. None: the parent's.
    """
    named = os.environ.get(f"GDNCHECK_PYTHON_{family.upper().replace('-', '_')}")
    if named or cached or family not in ENGINE_FAMILIES:
        return named
    for base in (Path.cwd(), Path(__file__).resolve().parent.parent):
        python = base / ENGINE_ENVIRONMENT / "bin" / "python"
        if python.exists():
            return str(python)
    return None


def engine_version(package: str) -> str | None:
    """Version of a distribution in its family's own environment, read without starting it."""
    python = python_for(package) if package in ENGINE_FAMILIES else None
    if python is None:
        return None
    folders = [str(folder) for folder in Path(python).parent.parent.glob("lib/python*/site-packages")]
    found = importlib.metadata.distributions(name=package, path=folders)
    return next((distribution.version for distribution in found), None)


def resolve(
    text: str, *, cache_dir: Path | str | None = None, sources: Mapping[str, str] | None = None
) -> KernelSpec:
    """Turn a name into what a worker loads.

    sources: family -> clone, for `@git:REV`.
    Raises BadInput for a name that is wrong or unknown, CannotRun for one whose package or version is
    not here, saying how to get it.
    """
    name = parse_name(text)
    if name.module is not None:
        assert name.attribute is not None
        return KernelSpec(name=str(name), module=name.module, attribute=name.attribute, by_import_path=True)
    family, op = name.family, name.op
    assert family is not None
    assert op is not None
    adapter = adapter_class(name)
    if adapter is None and name.path is None and name.revision is None:
        # Another package's kernel: only its own module, in a worker, knows what a version means there.
        version, directory = name.version, cache.find(family, name.version, cache_dir)
    else:
        package = getattr(adapter, "package", None)
        version, directory = _locate(name, package, cache_dir, sources or {})
    if version is not None and name.path is None and name.revision is None:
        name = msgspec.structs.replace(name, version=version)
    return KernelSpec(
        name=str(name),
        module=module_of(family, op),
        attribute=op,
        version=version,
        python=python_for(family, cached=directory is not None),
        sys_path=() if directory is None else (str(directory),),
    )


def _locate(
    name: KernelName, package: str | None, cache_dir: Path | str | None, sources: Mapping[str, str]
) -> tuple[str | None, Path | None]:
    """Version, and the directory that holds the package where it is not the installed one."""
    assert name.family is not None
    if name.path is not None:
        directory = Path(name.path).expanduser().resolve()
        if not directory.is_dir():
            raise BadInput(f"kernel {name}: there is no directory {name.path}")
        return None, directory
    if name.revision is not None:
        from .checkout import checked_out

        return None, checked_out(name.family, name.revision, sources, cache_dir)
    installed = installed_version(package)
    if name.version is None:
        if package is not None and installed is None:
            raise CannotRun(
                f"{name} needs {package}, which is not installed; pip install {package}, or {name}@VERSION"
            )
        return installed, None
    if package is None:
        raise BadInput(
            f"{name.family}.{name.op} is part of gdncheck and has no versions; leave @{name.version} out"
        )
    if name.version == installed:
        return installed, None
    cached = cache.find(name.family, name.version, cache_dir)
    if cached is None:
        raise CannotRun(
            f"{name} is not in the cache; run: gdncheck kernels fetch {name.family}@{name.version}"
        )
    return name.version, cached


def contract_of(text: str) -> Contract:
    """The contract of one of our own kernels, at the named version or else the installed one."""
    name = parse_name(text)
    if name.module is not None:
        raise BadInput(f"{text}: a function declares its contract in gdncheck_capabilities; run it to see it")
    adapter = adapter_class(name)
    if adapter is None:
        raise BadInput(f"{text} comes from another package; gdncheck diff prints its contract")
    contract: Contract = adapter.contract_for(name.version or installed_version(adapter.package))
    return contract


def default_kernels(op: str = "rule") -> list[str]:
    """Canonical names of the kernels that are installed and that a command runs when none is named.

    op: a case's op; `rule` asks for the chunk and recurrent kernels.
    """
    wanted = ("chunk", "recurrent") if op == "rule" else (op,)
    names = []
    for key, adapter in own_kernels().items():
        family, _, kernel_op = key.partition(".")
        if family in DEFAULT_FAMILIES and kernel_op in wanted:
            version = installed_version(adapter.package)
            if version is not None:
                names.append(f"{key}@{version}")
    return names
