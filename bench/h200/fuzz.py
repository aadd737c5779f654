"""Fuzz fla 0.4.0, fla 0.6.0 and vLLM 0.19.1 on one GPU: cases per second, and where the time goes.

    python bench/h200/fuzz.py [--seconds 540] [--jobs N] [--out DIR] [--kernels A,B]

T <= 512, 4 value heads, 128 x 128. Prints the counts every 30 s and writes the result as it goes on, so that
a run cut short says what there was: bench/results/h200-fuzz.json. A second run with the same --out goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gdncheck.compare.fuzz.fuzz import fuzz
from gdncheck.compare.fuzz.jsonout import document
from gdncheck.compare.fuzz.summary import lines
from record import save

KERNELS = "fla.chunk@0.4.0,fla.chunk@0.6.0,vllm.chunk@0.19.1"
EVERY = 30.0  # seconds between two notes


class Notes:
    """Keeps the rate as the run goes, and writes it down."""

    def __init__(self) -> None:
        self.started, self.last = time.perf_counter(), 0.0
        self.marks: list[dict] = []
        self.events: list[dict] = []

    def __call__(self, event: str, data: dict) -> None:
        at = time.perf_counter() - self.started
        if event in ("new", "confirmed", "shrunk", "lost", "ready"):
            self.events.append({"at": round(at, 1), "event": event, **data})
            print(f"[{at:6.1f} s] {event} {str(data)[:400]}", flush=True)
        if event != "progress" or at - self.last < EVERY:
            return
        before = self.marks[-1] if self.marks else {"at": 0.0, "cases": 0}
        rate = (data["cases"] - before["cases"]) / (at - before["at"])
        self.last = at
        self.marks.append({"at": round(at, 1), "cases": data["cases"], "per_second": round(rate, 1)})
        print(f"[{at:6.1f} s] {data['cases']} cases, {rate:.1f}/s, {data['kernels']}", flush=True)
        save("h200-fuzz", __file__, {"marks": self.marks, "events": self.events, "progress": data})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--out", default="build/h200-fuzz")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernels", default=KERNELS)
    parser.add_argument("--shape", action="append", default=[])
    parser.add_argument("--max-tokens", type=int)
    given = parser.parse_args()
    notes = Notes()
    run = Path(given.out)
    report = fuzz(
        kernels=given.kernels.split(","), seconds=given.seconds, device=given.device, jobs=given.jobs,
        shapes=given.shape, max_tokens=given.max_tokens, out=run, resume=(run / "run.sqlite").exists(),
        progress=notes, shrink_seconds=45.0, confirm_seconds=60.0,
    )  # fmt: skip
    steady = [mark["per_second"] for mark in notes.marks[len(notes.marks) // 3 :]]
    print("\n".join(lines(report)))
    save("h200-fuzz", __file__, {
        "marks": notes.marks, "events": notes.events, "report": document(report),
        "cases_per_second": {
            "overall": report.cases / report.seconds,
            "steady": sorted(steady)[len(steady) // 2] if steady else None,
        },
        "share_of_bookkeeping": report.share_of_bookkeeping,
    })  # fmt: skip


if __name__ == "__main__":
    main()
