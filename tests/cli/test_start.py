"""Starting is cheap and the folders of this repository never shadow another package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gdncheck.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "rich", "numpy", "scipy", "triton", "transformers", "safetensors", "matplotlib")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONSAFEPATH": "1", **environment},
    )  # fmt: skip


@pytest.mark.parametrize("arguments", [["--help"], *[[name, "--help"] for name in COMMANDS]], ids=str)
def test_help_imports_something_heavy(arguments):
    code = f"""
import sys
from gdncheck.cli import main
try:
    main({arguments!r})
except SystemExit as stop:
    assert stop.code == 0, stop.code
loaded = [name for name in {HEAVY!r} if name in sys.modules]
assert not loaded, loaded
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_importing_gdncheck_loads_torch():
    done = run_python("import sys, gdncheck; assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_transformers_finds_our_folder_kernels_instead_of_its_own_package():
    code = """
import importlib.util
import transformers
spec = importlib.util.find_spec("kernels")
assert spec is None or "site-packages" in str(spec.origin), spec
import gdncheck.kernels
assert gdncheck.kernels.__name__ == "gdncheck.kernels"
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_an_unknown_command_ends_in_a_traceback():
    done = run_python("from gdncheck.cli import main; main(['no-such-command'])")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "no-such-command" in done.stderr
