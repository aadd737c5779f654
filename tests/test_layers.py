"""Arrows between the layers point down only, and the verdict process stays free of kernel packages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Lowest first; a layer may import itself and those before it.
ORDER = ("reference", "capture", "kernels", "compare", "gdncheck")
KERNEL_PACKAGES = {"triton", "fla", "vllm", "sglang", "flashinfer", "transformers", "causal_conv1d"}
# Below these a process is a child that runs a kernel or a model, so it may import them.
IN_CHILDREN = ("kernels", "capture")
# A kernel itself, which workers load by its import path: nothing here may import it.
KERNELS_BY_PATH = ("gdncheck.kernels.planted_triton", "gdncheck.kernels.shared_fill")


def modules(layer: str) -> Iterator[Path]:
    return (ROOT / layer).rglob("*.py")


def package_of(directory: Path) -> tuple[str, ...]:
    """The package that a folder of the repository installs as."""
    parts = directory.relative_to(ROOT).parts
    return parts if parts[0] == "gdncheck" else ("gdncheck", *parts)


def imported(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Absolute names that a module imports, the line, and whether the import runs at module level."""
    tree = ast.parse(path.read_text())
    package = package_of(path.parent)
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        top = id(node) not in inside
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, top
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*base, *(node.module.split(".") if node.module else [])])
            yield stem, node.lineno, top
            for alias in node.names:
                yield f"{stem}.{alias.name}", node.lineno, top


def layer_of(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] != "gdncheck":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ORDER else "gdncheck"


@pytest.mark.parametrize("layer", ORDER[:-1])
def test_an_arrow_between_layers_points_up(layer):
    allowed = ORDER[: ORDER.index(layer) + 1]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules(layer)
        for name, line, _ in imported(path)
        if layer_of(name) is not None and name != "gdncheck" and layer_of(name) not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize("layer", ORDER)
def test_the_verdict_process_would_import_a_kernel_package(layer):
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules(layer)
        for name, line, top in imported(path)
        if name.split(".")[0] in KERNEL_PACKAGES and (top or layer not in IN_CHILDREN)
        if ".".join((*package_of(path.parent), path.stem)) not in KERNELS_BY_PATH
    ]
    assert wrong == []


@pytest.mark.parametrize("layer", ORDER)
def test_a_kernel_that_workers_load_by_its_path_is_imported(layer):
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules(layer)
        for name, line, _ in imported(path)
        if name in KERNELS_BY_PATH
    ]
    assert wrong == []


def test_reference_imports_more_than_torch():
    import sys

    allowed = {"torch", "gdncheck", *sys.stdlib_module_names}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules("reference")
        for name, line, _ in imported(path)
        if name.split(".")[0] not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize("layer", ORDER)
def test_a_subpackage_is_missing_from_the_wheel(layer):
    import tomllib

    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    for init in (ROOT / layer).rglob("__init__.py"):
        name = ".".join(package_of(init.parent))
        assert name in listed, f"add {name} to [tool.setuptools] packages"
