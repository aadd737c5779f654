"""NVIDIA's compute-sanitizer: where it is, and the words that run a worker under it.

The idea: the tool watches one process from outside, so it goes round a worker and nothing in the worker knows
of it. Torch's caching allocator is turned off there: it would hand out pieces of one large allocation, and
an access that leaves its piece would still be inside.

Source: the options that compute-sanitizer documents (2023.1 to 2025.3). Leaves to others: starting the worker
(`process`), reading what the tool wrote (compare).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from ..capture.errors import BadInput, CannotRun

Tool = Literal["memcheck", "racecheck", "initcheck", "synccheck"]
TOOLS: tuple[str, ...] = get_args(Tool)
PROGRAM = "compute-sanitizer"
VARIABLE = "GDNCHECK_COMPUTE_SANITIZER"
PLACES = ("$CUDA_HOME/bin", "$CUDA_PATH/bin", "/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
# Nothing is tuned: a tuner's stopwatch runs each configuration hundreds of times, each of them watched.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "GDNCHECK_TUNE": "never"}
PRINTED = 200  # reports that the tool writes out at most; it counts the rest


def find() -> Path:
    """The program. Raises CannotRun where it is not installed, BadInput where the variable names nothing."""
    named = os.environ.get(VARIABLE)
    if named:
        if shutil.which(named) is None:
            raise BadInput(f"{VARIABLE} is {named!r}, which is no program; unset it, or name {PROGRAM}")
        return Path(str(shutil.which(named)))
    search = [os.environ.get("PATH", ""), *(os.path.expandvars(place) for place in PLACES)]
    found = shutil.which(PROGRAM, path=os.pathsep.join(search))
    if found is None:
        raise CannotRun(
            f"{PROGRAM} is not installed here; it comes with the CUDA toolkit: put it on PATH, or name it in "
            f"${VARIABLE}"
        )
    return Path(found)


def command(program: Path, tool: str, log: Path) -> Sequence[str]:
    """The words before a worker's own. Raises BadInput for a tool that it has not."""
    if tool not in TOOLS:
        raise BadInput(f"tool {tool!r}: {PROGRAM} has {', '.join(TOOLS)}")
    return (
        str(program), "--tool", tool, "--log-file", str(log), "--print-limit", str(PRINTED),
        "--show-backtrace", "no", "--target-processes", "all",
    )  # fmt: skip
