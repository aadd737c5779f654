"""Run a script that was just written, in a process that cannot import gdncheck.

The idea: a report that says "this script shows it" has seen it do so. The process gets no PYTHON* variables
and no gdncheck, and is told where the kernel's files lie, as a stranger would be.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ...kernels.protocol import KernelSpec

SCRIPT_SECONDS = 600.0
WITHOUT_GDNCHECK = (
    "import runpy, sys; sys.modules['gdncheck'] = None; sys.argv[0] = 'repro.py'; "
    "runpy.run_path('repro.py', run_name='__main__')"
)


def run_script(directory: Path, folder: str | None) -> tuple[int | None, str]:
    """(exit status, what it printed); no status where it did not end in time."""
    words = [sys.executable, "-I", "-c", WITHOUT_GDNCHECK]
    if folder:
        words += ["--folder", folder]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    with tempfile.TemporaryFile("w+") as printed:
        try:
            done = subprocess.run(
                words, cwd=directory, env=environment, stdout=printed, stderr=printed,
                timeout=SCRIPT_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None, ""
        printed.seek(0)
        return done.returncode, printed.read()


def folder_of(spec: KernelSpec) -> str | None:
    """Where a kernel's files lie, if a script would not find them by itself."""
    if spec.sys_path:
        return spec.sys_path[0]
    if not spec.by_import_path:
        return None
    relative = Path(*spec.module.split("."))
    for entry in (*sys.path, os.getcwd()):
        base = Path(entry or ".") / relative
        if base.with_suffix(".py").is_file() or base.is_dir():
            return str(Path(entry or ".").resolve())
    return None
