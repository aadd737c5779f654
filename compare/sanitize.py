"""sanitize: a case through kernels under compute-sanitizer; the twin of `gdncheck sanitize`.

The idea: a worker runs one call of the kernel with the tool round it, and exits in order so that the tool can
end its account; what the tool blames is a function and a block, which this module turns into stage, sequence,
head and chunk. The answer itself is judged too: an access that is out of bounds need not change it.

Leaves to others: finding and starting the tool (`kernels.sanitizer`), its text (`sanitize_log`), printing
(`sanitize_report`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from ..capture.case import Case
from ..capture.errors import CannotRun, GdncheckError
from ..kernels import sanitizer
from ..kernels.interface import KernelCall, KernelInfo, RunResult
from ..kernels.pool import KernelHandle, WorkerPool
from ..kernels.registry import default_kernels
from ..kernels.stage_names import function_named
from .diff import cases_of
from .repeats import Bench
from .sanitize_log import Fault, SanitizerLog, read_log
from .threads import threads_for
from .verdict import FAILING, VERDICT_ORDER, Place, VerdictWord

Say = Callable[..., None]
DEVICE = "cuda"
EXIT_LIMIT = 120.0  # seconds for the tool to end its account; racecheck sorts its hazards then


class Blamed(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, in the words of this program."""

    fault: Fault
    stage: str | None
    """Of the rule, or the operation beside it; None for a function that is not the kernel's."""
    sequence: int | None = None
    head: int | None = None
    chunk: int | None = None
    """Of the first report's block, within its sequence; None where the function's grid is not known."""

    @property
    def weight(self) -> Literal["fail", "suspect", "none"]:
        """What it counts for by itself.

        A failed API call counts only through the call that it spoils (torch and Triton probe, and expect
        some to fail); words that nobody could read are no proof; a read of what nobody wrote may be masked.
        """
        if self.fault.kind == "api-error" or self.fault.level == "info":
            return "none"
        if self.fault.kind in ("other", "uninitialised-read") or self.fault.level == "warning":
            return "suspect"
        return "fail"

    @property
    def place(self) -> Place | None:
        """As other commands give it; None where no stage is known."""
        if self.stage is None:
            return None
        cls: Literal["moves", "wrong"] = "moves" if self.fault.kind == "race" else "wrong"
        return Place(
            tensor=self.stage,
            class_=cls,
            sequence=self.sequence,
            head=self.head,
            chunk=self.chunk,
            token=None,
        )


class SanitizeResult(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel on one case under one tool."""

    kernel: str
    case: str
    layer: int | None
    tool: str
    verdict: VerdictWord
    reason: str
    blamed: tuple[Blamed, ...] = ()
    reported: int | None = None
    """Reports as the tool counts them; None where it never came to say."""
    answer: VerdictWord | None = None
    """What the call returned, judged against the truth; None where it returned nothing."""
    answer_reason: str = ""
    launched: dict[str, str] = {}
    """Configurations of autotuned kernels that ran."""
    seconds: float = 0.0
    log: str = ""
    """The tool's own text."""


class SanitizeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was run."""

    results: tuple[SanitizeResult, ...]
    strict: bool = False
    seconds: float = 0.0
    command: str = ""

    @property
    def verdict(self) -> VerdictWord:
        words = {result.verdict for result in self.results}
        return next(word for word in VERDICT_ORDER if word in words)

    @property
    def exit_status(self) -> int:
        """0, 1 or 3 of the design."""
        words = {result.verdict for result in self.results}
        if words == {"skipped"}:
            return 3
        return 1 if words & FAILING else int(self.strict and "suspect" in words)


def sanitize(
    case: Case | Path | str | None = None,
    kernels: str | Sequence[str] | None = None,
    *,
    layer: int | None = None,
    captures: Path | str = "captures",
    tools: Sequence[str] = ("memcheck",),
    first: int | None = None,
    time_limit: float = 600.0,
    seed: int = 0,
    strict: bool = False,
    progress: Say | None = None,
    command: str = "",
) -> SanitizeReport:
    """Run each kernel once under each tool, with torch's caching allocator off, and say what it blames.

    tools: memcheck, racecheck, initcheck, synccheck. first: use the first N tokens of the first sequence (the
    tools are ten to a hundred times slower than the kernel). time_limit: seconds for the call.
    Raises BadInput for a wrong case, tool or name; CannotRun where the tool or a GPU is missing.
    """
    started = time.monotonic()
    say: Say = progress or (lambda *args: None)
    program = sanitizer.find()
    for tool in tools:
        sanitizer.command(program, tool, Path())
    _check_device()
    names = [kernels] if isinstance(kernels, str) else list(kernels or default_kernels())
    if not names:
        raise CannotRun("no kernel is installed; name one with --kernel, or see gdncheck doctor")
    results: list[SanitizeResult] = []
    for one in cases_of(case, layer, captures, first):
        with threads_for(one["v"].numel()):
            bench = Bench(one, DEVICE, seed)
            for name in names:
                for tool in tools:
                    say(f"{name} under {tool}", len(results), None)
                    results.append(_run(bench, name, program, tool, time_limit, asked=bool(kernels)))
    return SanitizeReport(
        results=tuple(results), strict=strict, seconds=time.monotonic() - started, command=command
    )


def _check_device() -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        raise CannotRun(
            "no CUDA device can be used here, and compute-sanitizer watches one; see gdncheck doctor"
        )


def _run(bench: Bench, name: str, program: Path, tool: str, limit: float, *, asked: bool) -> SanitizeResult:
    """One worker under one tool, from its start to the end of its account."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gdncheck-") as folder:
        log = Path(folder) / "sanitizer.log"
        with WorkerPool(device=DEVICE, time_limit=limit) as pool:
            wrapper = sanitizer.command(program, tool, log)
            try:
                handle = pool.begin(name, wrapper=wrapper, environment=sanitizer.ENVIRONMENT)
                info, result = _called(handle, bench.call)
                handle.finish(EXIT_LIMIT)
            except GdncheckError as error:
                refused = read_log(_text(log)).refusals
                if asked and not refused:
                    raise
                return _skipped(
                    bench, name, tool, "; ".join(refused) or str(error), time.monotonic() - started
                )
        text = _text(log)
    found = read_log(text)
    return _result(bench, info, tool, result, found, text, time.monotonic() - started)


def _called(handle: KernelHandle, call: KernelCall) -> tuple[KernelInfo, RunResult]:
    return handle.info, handle.run([call])[0]


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def _skipped(bench: Bench, name: str, tool: str, reason: str, seconds: float) -> SanitizeResult:
    case = bench.case
    return SanitizeResult(
        kernel=name, case=str(case.path) if case.path is not None else case.label, layer=case.origin.layer,
        tool=tool, verdict="skipped", reason=reason, seconds=seconds,
    )  # fmt: skip


def _result(
    bench: Bench,
    info: KernelInfo,
    tool: str,
    result: RunResult,
    found: SanitizerLog,
    text: str,
    seconds: float,
) -> SanitizeResult:
    blamed = tuple(blame(fault, bench.call.tensors["cu_seqlens"].tolist(), info) for fault in found.faults)
    case = bench.case
    ruling = bench.rule(info, result) if result.status == "ok" else None
    answer = None if ruling is None else ruling.verdict
    verdict, reason = _ruling(tool, result, found, blamed, answer)
    return SanitizeResult(
        kernel=info.name,
        case=str(case.path) if case.path is not None else case.label,
        layer=case.origin.layer,
        tool=tool,
        verdict=verdict,
        reason=reason,
        blamed=blamed,
        reported=found.total,
        answer=answer,
        answer_reason=(result.message or "") if ruling is None else ruling.reason,
        launched=dict(result.evidence.get("launched", {})),
        seconds=seconds,
        log=text,
    )


def _ruling(
    tool: str, result: RunResult, found: SanitizerLog, blamed: Sequence[Blamed], answer: VerdictWord | None
) -> tuple[VerdictWord, str]:
    """What the tool's account adds up to, beside what the call returned."""
    blaming: list[Blamed] = sorted(
        (one for one in blamed if one.weight != "none"), key=lambda one: one.weight != "fail"
    )
    if blaming:
        more = f", {len(blaming) - 1} more" if len(blaming) > 1 else ""
        spoils = any(one.fault.kind == "uninitialised-read" for one in blaming) and answer == "fail"
        hard = blaming[0].weight == "fail" or spoils or result.status not in ("ok", "refused")
        return "fail" if hard else "suspect", f"{tool}: {in_words(blaming[0])}{more}"
    if result.status == "refused":
        return "skipped", result.message or "the kernel refused the call"
    if found.refusals:
        return "skipped", f"{tool} could not look: {found.refusals[0]}"
    if result.status == "timeout":
        return "timeout", f"{result.message}; the tools are slow: add --first, or raise --time-limit"
    if result.status != "ok":
        return "error", f"the call failed under {tool}, which blames no kernel: {result.message}"
    if found.total is None:
        return "suspect", f"{tool} never wrote its summary, so it may not have looked to the end"
    calls = sum(one.fault.times for one in blamed if one.fault.kind == "api-error")
    if found.total > calls:
        return "suspect", f"{tool} counts {found.total} reports, of which {calls} can be read"
    failed = f"; {calls} API calls returned errors" if calls else ""
    return "pass", f"{tool}: no error in a kernel{failed}"


def in_words(one: Blamed) -> str:
    """`invalid access, __global__ read of size 4 bytes, in stage kkt (kkt_kernel, kkt.py:63)`."""
    fault = one.fault
    line = f"{fault.file.rsplit('/', 1)[-1]}:{fault.line}" if fault.file else ""
    where = ", ".join(part for part in (fault.function or "", line) if part)
    stage = f" in stage {one.stage}" if one.stage else ""
    at = ", ".join(
        f"{name} {number}"
        for name, number in (("sequence", one.sequence), ("head", one.head), ("chunk", one.chunk))
        if number is not None
    )
    times = f", {fault.times} reports" if fault.times > 1 else ""
    words = f"{fault.kind.replace('-', ' ')}: {fault.what}{stage}"
    return f"{words}{f' ({where})' if where else ''}{f' at {at}' if at else ''}{times}"


def blame(fault: Fault, offsets: Sequence[int], info: KernelInfo) -> Blamed:
    """Stage, sequence, head and chunk of a fault. offsets: cu_seqlens of the call."""
    name = fault.function or ""
    known = function_named(name) if name else None
    if known is None:
        # A kernel of the user's own may name its functions after the stages that it declares.
        declared = (stage for stage in info.capabilities.stages if stage in name)
        return Blamed(fault=fault, stage=next(declared, None))
    size = info.capabilities.default_chunk_size
    if fault.block is None or not known.grid or size is None:
        return Blamed(fault=fault, stage=known.stage)
    at: dict[str, Any] = dict(zip(known.grid, fault.block, strict=False))
    sequence, chunk = _chunk_of(at["chunk"], offsets, size)
    return Blamed(fault=fault, stage=known.stage, sequence=sequence, head=at["head"], chunk=chunk)


def _chunk_of(packed: int, offsets: Sequence[int], size: int) -> tuple[int | None, int | None]:
    """Sequence and chunk of the packed chunk's number; None beyond the last, which no sequence owns."""
    for sequence, (start, stop) in enumerate(pairwise(offsets)):
        chunks = -(-(stop - start) // size)
        if packed < chunks:
            return sequence, packed
        packed -= chunks
    return None, None
