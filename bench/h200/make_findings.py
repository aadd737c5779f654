"""Write the stand-alone scripts of docs/findings.md into findings/, one folder each; no kernel is run.

Each is what `gdncheck export --no-run` writes for a finding whose facts were kept: an input of the kind that
showed it on an H200, the pin or the poisoned memory that it needs, and the kernel's own call. `findings.sh`
beside this file runs them on a GPU and keeps what they print.

    python bench/h200/make_findings.py [--out findings]
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from gdncheck.capture.case import Case
from gdncheck.capture.make import make
from gdncheck.compare.export import seeded
from gdncheck.compare.export.export import Exported, export
from gdncheck.compare.finding import Facts, with_facts

KKT = "chunk_scaled_dot_kkt_fwd_kernel"
RACE = "other bits from run to run, and wrong by up to 50 times what rounding explains"
EMPTY = "tokens behind an empty sequence are not computed: their rows are what fresh memory held"
LEAK = "NaN in one sequence reaches the rows of another one's last chunk, which is not full"


def plain(lengths: list[int], k_heads: int, v_heads: int, dims: int, *, state: str) -> Case:
    """The family qwen: what a layer of the model sees."""
    return make(
        "qwen", lengths=lengths, k_heads=k_heads, v_heads=v_heads, dims=(dims, dims), state=state, seed=1,
        qk="normalised",
    )  # fmt: skip


def poisoned(case: Case, sequences: list[int]) -> Case:
    """NaN in every token of some sequences."""
    cu = case["cu_seqlens"].tolist()
    changed: dict[str, Any] = {}
    for name in ("q", "k", "v", "g", "beta"):
        changed[name] = case[name].clone()
        for n in sequences:
            changed[name][cu[n] : cu[n + 1]] = torch.nan
    return case.with_tensors(**changed)


def facts(kernel: str, **known: Any) -> Facts:
    """What docs/findings.md says of it."""
    environment = {"torch": "2.11.0", "triton": "3.6.0"}
    version = kernel.partition("@")[2]
    return Facts(kernel=kernel, version=version, machine=H200, environment=environment, **known)


def findings() -> dict[str, tuple[Case, Case | None, Facts]]:
    """Folder -> (failing case, passing case, facts)."""
    pin = {"autotune": f"{KKT}:BK=64+num_warps=4+num_stages=2"}
    race = facts(
        "vllm.chunk@0.19.1", kind="wrong", class_="moves", rule="run-to-run", tier=4, reason=RACE,
        deviations=pin, failures=340, runs=640,
    )  # fmt: skip
    found = {"vllm-0.19.1-kkt-race": (drawn(plain([474], 16, 32, 128, state="none")), None, race)}
    empty, full = plain([0, 3], 1, 1, 64, state="random"), plain([3, 0], 1, 1, 64, state="random")
    for kernel in ("fla.chunk@0.4.0", "vllm.chunk@0.19.1", "vllm.chunk@0.33.0", "sglang.chunk@0.5.23"):
        known = facts(
            kernel, kind="nonfinite", class_="nan", rule="non-finite", tier=1, reason=EMPTY,
            deviations={"memory": "nan"},
        )  # fmt: skip
        found[f"{kernel.replace('.chunk@', '-')}-empty-sequence"] = (empty, full, known)
    hang = facts(FLASHINFER, kind="timeout", reason="no answer within 150 s", time_limit=60.0)
    found["flashinfer-0.6.6-empty-sequence"] = (plain([0, 65, 70], 1, 1, 128, state="none"), None, hang)
    whole = plain([64, 1, 100, 70], 1, 2, 128, state="none")
    leak = facts(FLASHINFER, kind="nonfinite", class_="nan", rule="isolation", tier=4, reason=LEAK)
    found["flashinfer-0.6.6-nan-leak"] = (poisoned(whole, [1, 3]), whole, leak)
    return found


FLASHINFER = "flashinfer.chunk@0.6.6"
H200: dict[str, Any] = {
    "python": "3.12", "platform": "Linux x86_64", "packages": {"torch": "2.11.0", "triton": "3.6.0"},
    "gpu": {"name": "NVIDIA H200", "capability": "9.0"},
}  # fmt: skip


def drawn(case: Case) -> Case:
    """Values that a script can draw by itself, where tensors would be large."""
    return seeded.seeded_case(case, seeded.recipes_of(case), SEED)


SEED = 0


def write(name: str, case: Case, passing: Case | None, known: Facts, out: Path) -> Exported:
    """One folder."""
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    return export(
        with_facts(case, known), folder, values="seeded" if case.origin.note == seeded.NOTE else "exact",
        run=False, passing=passing, device="cpu",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("findings"))
    out = parser.parse_args().out
    for name, (case, passing, known) in findings().items():
        done = write(name, case, passing, known, out)
        print(f"{done.directory}: {', '.join(done.files)}")


if __name__ == "__main__":
    main()
