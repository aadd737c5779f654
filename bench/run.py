"""Run every benchmark that this machine can run, one after another: `make bench`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Modules that the benchmarks share, and trials of the verdict that take an hour and measure no time.
SHARED = {"run.py", "record.py", "honest_cases.py", "honest_kernels.py", "plots.py", "conv_cases.py"}
TRIALS = {
    "specificity.py", "calibrate.py", "fuzz_million.py", "fuzz_planted.py", "kill9.py", "life_sound.py",
    "sglang_guard.py",
}  # fmt: skip
NOT_BENCHMARKS = SHARED | TRIALS


def main() -> int:
    # The scripts import bench/record.py from their own folder, which safe-path mode would hide.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    failed = []
    for script in sorted(HERE.glob("*.py")):
        if script.name in NOT_BENCHMARKS:
            continue
        started = time.monotonic()
        print(f"== bench/{script.name}", flush=True)
        if subprocess.run([sys.executable, script.name], cwd=HERE, env=environment).returncode != 0:
            failed.append(script.name)
        print(f"== bench/{script.name}: {time.monotonic() - started:.1f} s", flush=True)
    if failed:
        print(f"make bench: failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
