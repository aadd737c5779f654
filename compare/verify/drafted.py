"""Decode with drafts: chains of speculative steps for several kernels; behind `gdncheck decode --draft`.

The idea: the command that steps a kernel token by token steps it draft by draft when asked to; one line per
kernel and state dtype says whether a chain of prefill, verify steps, a plain step and a prefill kept the
right state, and at which turn it did not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...capture.case import Case
from ...capture.casefile import read_case
from ...capture.errors import BadInput
from ...kernels.pool import WorkerPool
from ..decode.stream import DTYPES
from ..diff import verdict_device
from ..jsonout import SCHEMA, place, plain_numbers
from ..report import STYLES
from ..threads import threads_for
from ..verdict import VERDICT_ORDER, Ruling, VerdictWord, exit_status_of
from .session import NEEDS
from .speculation import Speculation, prefill_for, speculate
from .step import NO_ERROR


class DraftReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a decode run with drafts found out."""

    verdict: VerdictWord
    case: str
    draft: int
    steps: int
    chains: tuple[Speculation, ...]
    state_dtypes: tuple[str, ...]
    """Of each chain."""
    strict: bool = False
    seconds: float = 0.0
    command: str = ""

    @property
    def exit_status(self) -> int:
        """0, 1 or 3 of the design."""
        return exit_status_of((c.verdict for c in self.chains), strict=self.strict)


def decode_drafts(
    case: Case | Path | str,
    *,
    kernels: Sequence[str],
    draft: int,
    steps: int = 8,
    state_dtypes: Sequence[str] = (),
    device: str = "auto",
    time_limit: float = 300.0,
    seed: int = 0,
    strict: bool = False,
    sources: Mapping[str, str] | None = None,
    progress: Callable[[str], None] | None = None,
    command: str = "",
) -> DraftReport:
    """Chains of `steps` verify steps with drafts of 1..draft tokens, for each kernel and state dtype.

    kernels: that take columns of slots; each is prefilled by its own family's chunk kernel.
    Raises BadInput for wrong arguments, CannotRun for a kernel that is not here.
    """
    started = time.monotonic()
    given = case if isinstance(case, Case) else read_case(case)
    if not kernels:
        raise BadInput("drafts need a kernel that verifies; name one, as --kernel vllm.verify@0.33.0")
    unknown = next((name for name in state_dtypes if name not in DTYPES), None)
    if unknown is not None:
        raise BadInput(f"dtype {unknown!r} is unknown; use fp32, bf16 or fp16")
    chains: list[Speculation] = []
    dtypes: list[str] = []
    say = progress or (lambda text: None)
    with WorkerPool(device=device, time_limit=time_limit, sources=sources) as pool:
        for name in kernels:
            verify, prefill = pool.begin(name), pool.begin(prefill_for(name))
            for word in state_dtypes or ("fp32",):
                say(f"{name}: state {word}")
                dtypes.append(word)
                if not verify.info.capabilities.columns:
                    ruling = Ruling(verdict="skipped", reason=f"{name} {NEEDS}", error=NO_ERROR)
                    chains.append(
                        Speculation(
                            kernel=verify.info.name, prefill="", turns=0, drafted=0, accepted=0, ruling=ruling
                        )
                    )
                    continue
                with threads_for(given["v"].numel()):
                    chains.append(
                        speculate(
                            verify, prefill, given, draft=draft, steps=steps, seed=seed,
                            state_dtype=str(DTYPES[word]).removeprefix("torch."),
                            device=verdict_device(device),
                        )
                    )  # fmt: skip
    words = {c.verdict for c in chains}
    return DraftReport(
        verdict=next((word for word in VERDICT_ORDER if word in words), "skipped"),
        case=str(given.path) if given.path is not None else given.label,
        draft=draft, steps=steps, chains=tuple(chains), state_dtypes=tuple(dtypes), strict=strict,
        seconds=time.monotonic() - started, command=command,
    )  # fmt: skip


def print_report(report: DraftReport, console: Console) -> None:
    """Print a decode run with drafts."""
    head = f"{report.case}: {report.steps} verify steps with drafts of 1 to {report.draft} tokens"
    console.print(escape(head), highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("kernel", "prefill", "state", "verdict"):
        table.add_column(name, no_wrap=True)
    for name in ("calls", "drafted", "accepted"):
        table.add_column(name, justify="right", no_wrap=True)
    for chain, dtype in zip(report.chains, report.state_dtypes, strict=True):
        verdict = f"[{STYLES[chain.verdict]}]{chain.verdict}[/]"
        table.add_row(
            escape(chain.kernel), escape(chain.prefill), dtype, verdict,
            str(chain.turns), str(chain.drafted), str(chain.accepted),
        )  # fmt: skip
    console.print(table)
    for chain in report.chains:
        words = f"[{STYLES[chain.verdict]}]{escape(chain.kernel)}[/]: {escape(chain.ruling.reason)}"
        console.print(words, highlight=False, soft_wrap=True)
    word = f"[{STYLES[report.verdict]}]{report.verdict}[/]"
    again = f"{word} in {report.seconds:.1f} s; again: {escape(report.command)}"
    console.print(again, highlight=False, soft_wrap=True)


def dumps(report: DraftReport) -> str:
    """One JSON document, schema 1."""
    body: dict[str, Any] = {
        "schema": SCHEMA, "verdict": report.verdict, "case": report.case, "draft": report.draft,
        "steps": report.steps,
        "results": [
            {
                "kernel": c.kernel, "prefill": c.prefill, "state_dtype": dtype, "verdict": c.verdict,
                "tier": c.ruling.tier, "rule": c.ruling.rule, "reason": c.ruling.reason, "turns": c.turns,
                "failed_turn": c.failed_turn, "drafted": c.drafted, "accepted": c.accepted,
                "first_nonfinite": place(c.ruling.first_nonfinite),
                "worst_tile": place(c.ruling.worst_tile), "error": c.ruling.error,
            }
            for c, dtype in zip(report.chains, report.state_dtypes, strict=True)
        ],
        "seconds": report.seconds, "command": report.command,
    }  # fmt: skip
    return json.dumps(plain_numbers(body), indent=2, allow_nan=False)
