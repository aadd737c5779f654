"""Ten minutes of fuzzing on four planted kernels: all of them found, one finding each, shrunk and replayed.

    nice python bench/fuzz_planted.py [--seconds 600] [--out DIR]

Kernels: tests/fuzz/fuzz_kernels.py (a fault that needs T mod 64 = 1, a split at 63 and beta > 0.9; a process
crash; a hang; a flake in one call of ten). Each finding is replayed in a new process, on the kernel and on
the sound one. Results: bench/results/fuzz-planted.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests" / "fuzz")]
from gdncheck.capture.casefile import read_case  # noqa: E402
from gdncheck.compare.fuzz.fuzz import fuzz  # noqa: E402
from gdncheck.compare.fuzz.jsonout import document  # noqa: E402
from gdncheck.compare.replay import replay  # noqa: E402
from record import save  # noqa: E402

KERNELS = ("edge", "crash", "hang", "flake")
SOUND = "fuzz_kernels:sound"


def replayed(run: Path, row) -> dict:
    """A finding in new processes: on its kernel, and on the sound one."""
    name = f"{run}/{row.signature}"
    own = replay(name, device="cpu")
    fixed = replay(name, SOUND, device="cpu")
    case = read_case(run / (row.shrunk_file or row.case_file))
    return {
        "own": own.outcome, "fixed": fixed.outcome, "tokens": case.n_tokens,
        "value_heads": case["v"].shape[1], "sequences": case.n_sequences, "status": row.status,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out")
    given = parser.parse_args()
    started = time.monotonic()

    def tell(event: str, data: dict) -> None:
        if event not in ("case", "tick", "progress", "shrinking"):
            print(f"[{time.monotonic() - started:6.1f} s] {event} {data}", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        run = Path(given.out or scratch) / "run"
        report = fuzz(
            kernels=[f"fuzz_kernels:{name}" for name in KERNELS], seconds=given.seconds, device="cpu",
            out=run, resume=(run / "run.sqlite").exists(), progress=tell, shrink_seconds=60.0,
        )  # fmt: skip
        checks = {row.signature: replayed(run, row) for row in report.findings}
        for signature, found in checks.items():
            print(signature, found, flush=True)
        each = {name: sum(row.kernel.endswith(name) for row in report.findings) for name in KERNELS}
        save(
            "fuzz-planted",
            __file__,
            {
                "seconds": given.seconds,
                "findings_by_kernel": each,
                "replays": checks,
                "report": document(report),
            },
        )
        print(each, flush=True)


if __name__ == "__main__":
    main()
