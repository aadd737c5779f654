"""The main job on a machine without a GPU: trained checkpoint, capture, real kernels, verdict.

Every step is a command that a user could type; this file only types them, stops at the first that
fails and tells how long each took. The captures go to a temporary directory unless --out names one.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "tiny-qwen35moe"
TOKENS = ROOT / "examples" / "tokens200.json"
# fla.recurrent takes one interpreted step per token, so it gets the length for which FLA's own
# layers choose it.
RECURRENT_TOKENS = 64


def steps(captures: Path) -> list[list[str]]:
    """The commands of the demo, in order; captures is where the cases go."""
    diff = ["diff", "--layer", "17", "--captures", str(captures)]
    return [
        ["capture", str(MODEL), "--tokens", str(TOKENS), "--layer", "17", "--out", str(captures)],
        [*diff, "--kernel", "fla.chunk", "--kernel", "transformers.chunk"],
        [*diff, "--kernel", "fla.recurrent", "--first", str(RECURRENT_TOKENS)],
    ]


def shown(path: str) -> str:
    """A path as a reader of this checkout would type it."""
    try:
        return str(Path(path).relative_to(ROOT))
    except ValueError:
        return path


def run(captures: Path) -> int:
    """Run the steps; returns the exit status of the first that failed, else 0."""
    started = time.monotonic()
    for arguments in steps(captures):
        print(f"\n$ gdncheck {shlex.join(shown(a) for a in arguments)}", flush=True)
        step_started = time.monotonic()
        status = subprocess.run([sys.executable, "-P", "-m", "gdncheck.cli", *arguments]).returncode
        print(f"[exit {status}, {time.monotonic() - step_started:.1f} s]", flush=True)
        if status != 0:
            return status
    print(f"\nmake demo: all steps passed in {time.monotonic() - started:.1f} s")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="keep the captures here")
    out = parser.parse_args().out
    if out is not None:
        return run(out)
    with tempfile.TemporaryDirectory(prefix="gdncheck-demo-") as directory:
        return run(Path(directory))


if __name__ == "__main__":
    sys.exit(main())
