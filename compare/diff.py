"""diff: cases through kernels and truth; the library twin of `gdncheck diff`.

The idea: what is to be judged (a layer, all layers, a file, a case in memory) becomes a list of cases, the
kernels are opened once, and every (case, kernel) gives one result. Two files are compared as files
(`casediff`). Judging is `session`'s and `judge`'s, printing `report`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..capture.case import Case
from ..capture.casefile import read_case
from ..capture.directory import cases_of_layer, layers_in
from ..capture.errors import BadInput, CannotRun, GdncheckError
from ..kernels.pool import KernelHandle, WorkerPool
from ..kernels.registry import default_kernels
from .cut import first_tokens
from .pairwise import Pair, pairs_of
from .relations.plan import Choice
from .session import Settings, diff_one
from .soundness import Soundness, soundness_of
from .threads import threads_for
from .tolerances import Given, Tolerance, tolerances
from .trial import Trial
from .verdict import FAILING, VERDICT_ORDER, DiffResult, Ruling, VerdictWord, exit_status_of
from .witness import Witness

Progress = Callable[[str], None]


class CaseInput(msgspec.Struct, frozen=True, kw_only=True):
    """What the report says about one case's input."""

    case: str
    layer: int | None
    tokens: int
    sequences: int
    heads: int
    dtype: str
    sound: bool
    reason: str
    remarks: tuple[str, ...] = ()
    truth_seconds: float = 0.0


class DiffReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a diff found out."""

    verdict: VerdictWord
    results: tuple[DiffResult, ...]
    inputs: tuple[CaseInput, ...]
    first_bad_layer: int | None = None
    """First layer, in order, on which some kernel failed or whose input is bad; with all layers only."""
    strict: bool = False
    tolerance: dict[str, Tolerance] | None = None
    """By tensor, where the caller gave any: verdicts were then reached by tolerance."""
    pairs: tuple[Pair, ...] = ()
    """Kernels against each other, where several answered a case."""
    seconds: float = 0.0
    command: str = ""
    """Repeats this diff."""

    @property
    def exit_status(self) -> int:
        """0, 1 or 3 of the design."""
        named = any(r.ruling.contract_differences for r in self.results)
        return exit_status_of((r.verdict for r in self.results), strict=self.strict, differences=named)


def diff(
    case: Case | Path | str | None = None,
    *,
    kernels: Sequence[str] | None = None,
    op: str = "rule",
    layer: int | None = None,
    captures: Path | str = "captures",
    device: str = "auto",
    time_limit: float = 300.0,
    seed: int = 0,
    strict: bool = False,
    relations: Choice = "auto",
    first: int | None = None,
    atol: Given = None,
    rtol: Given = None,
    stages: bool = False,
    sources: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> DiffReport:
    """Run kernels on a case, a file, a layer or (with neither) all captured layers, and rule on each.

    kernels: names; None: what is installed. first: judge the first so many tokens of the first sequence.
    op: `rule`, or another operation of the layer, or `core` for all of them in order (`ops.diff.diff_ops`);
    relations, tolerances and stages are the rule's.
    atol, rtol: decide by torch.allclose-like tolerances instead of tiers 2 and 3, and mark the verdict so: a
    number for both tensors, or by tensor, as {"output": 1e-3}.
    stages: compare each kernel's stage functions too, and say which stage makes an error.
    sources: family -> clone, for kernels named `@git:REV`.
    progress: told in a few words what is being done.
    Raises BadInput for a wrong file, layer or name; CannotRun where nothing could run.
    """
    if op != "rule":
        from .ops.diff import diff_ops

        if stages or atol is not None or rtol is not None:
            raise BadInput(f"stages and tolerances are for the rule, not for op {op}; leave them out")
        return diff_ops(
            op, case, kernels=kernels, layer=layer, captures=captures, device=device, time_limit=time_limit,
            seed=seed, strict=strict, first=first, sources=sources, progress=progress, command=command,
        )  # fmt: skip
    started = time.monotonic()
    check_arguments(relations=relations, first=first)
    settings = Settings(seed=seed, relations=relations, tolerances=tolerances(atol, rtol), stages=stages)
    names = list(kernels) if kernels else default_kernels()
    if not names:
        raise CannotRun("no kernel is installed; name one with --kernel, or see gdncheck doctor")
    results: list[DiffResult] = []
    inputs: list[CaseInput] = []
    pairs: list[Pair] = []
    say = progress or (lambda text: None)
    with WorkerPool(device=device, time_limit=time_limit, sources=sources) as pool:
        handles = [pool.begin(name) for name in names]
        for one in cases_of(case, layer, captures, first):
            trials: list[Trial] = []
            row, part = diff_case(
                one, handles, settings, asked=bool(kernels), device=device, say=say, trials=trials
            )
            inputs.append(row)
            results += part
            pairs += pairs_of(trials)
    return report_of(
        results,
        inputs,
        all_layers=case is None and layer is None,
        strict=strict,
        settings=settings,
        pairs=pairs,
        seconds=time.monotonic() - started,
        command=command,
    )


def check_arguments(*, relations: str, first: int | None) -> None:
    """Arguments at the door."""
    if relations not in ("auto", "none", "quick", "all"):
        raise BadInput(f"relations is {relations!r}; use auto, none, quick or all")
    if first is not None and first < 1:
        raise BadInput(f"first is {first}; give 1 or more tokens")


def cases_of(
    case: Case | Path | str | None, layer: int | None, captures: Path | str, first: int | None
) -> Iterator[Case]:
    """The cases in the order in which they are judged, read one at a time."""
    if case is not None and layer is not None:
        raise BadInput(f"give a case or --layer {layer}, not both")
    found: Iterator[Case]
    if isinstance(case, Case):
        found = iter([case])
    elif case is not None:
        found = iter([read_case(case)])
    else:
        layers = [layer] if layer is not None else layers_in(captures)
        found = (read_case(path) for number in layers for path in cases_of_layer(captures, number))
    for one in found:
        yield first_tokens(one, first) if first is not None else one


def diff_case(
    case: Case,
    handles: Sequence[KernelHandle],
    settings: Settings,
    *,
    asked: bool,
    device: str,
    say: Progress,
    trials: list[Trial] | None = None,
) -> tuple[CaseInput, list[DiffResult]]:
    """All kernels on one case. asked: the kernels were named by the user; trials: takes their answers."""
    with threads_for(case["v"].numel()):
        say(f"{case.label}: truth")
        started = time.monotonic()
        witness = Witness(case, device=verdict_device(device), seed=settings.seed)
        soundness = soundness_of(witness)
        witness.truth()
        row = _input_row(witness, soundness, time.monotonic() - started)
        results = []
        for handle in handles:
            say(f"{case.label}: {handle.spec.name}")
            results.append(_diff_or_skip(handle, witness, soundness, settings, asked, trials))
    return row, results


def verdict_device(device: str) -> str:
    """Where truth and yardsticks are computed: the GPU if kernels run there."""
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def _diff_or_skip(
    handle: KernelHandle,
    witness: Witness,
    soundness: Soundness,
    settings: Settings,
    asked: bool,
    trials: list[Trial] | None,
) -> DiffResult:
    """A kernel that nobody named may be missing or too slow: it is skipped with the reason."""
    try:
        info = handle.info
    except GdncheckError as error:
        if asked:
            raise
        return _skipped(handle.spec.name, witness, str(error))
    limit = info.capabilities.max_tokens_cpu
    interpreted = bool(info.environment.get("interpreted"))
    if not asked and interpreted and limit is not None and witness.inputs.n_tokens > limit:
        reason = (
            f"{witness.inputs.n_tokens} tokens are slow in Triton's interpreter (limit {limit}); "
            f"name it with --kernel, or add --first {min(limit, 64)}"
        )
        return _skipped(info.name, witness, reason)
    return diff_one(handle, witness, soundness, settings, trials=trials)


def _skipped(name: str, witness: Witness, reason: str) -> DiffResult:
    case = witness.case
    ruling = Ruling(verdict="skipped", reason=reason, error={"output": None, "state": None})
    label = str(case.path) if case.path is not None else case.label
    return DiffResult(kernel=name, case=label, layer=case.origin.layer, ruling=ruling)


def _input_row(witness: Witness, soundness: Soundness, seconds: float) -> CaseInput:
    case, inputs = witness.case, witness.inputs
    return CaseInput(
        case=str(case.path) if case.path is not None else case.label,
        layer=case.origin.layer,
        tokens=inputs.n_tokens,
        sequences=inputs.n_sequences,
        heads=inputs.heads,
        dtype=str(inputs.v.dtype).removeprefix("torch."),
        sound=soundness.sound,
        reason=soundness.reason,
        remarks=soundness.remarks,
        truth_seconds=seconds,
    )


def report_of(
    results: list[DiffResult],
    inputs: list[CaseInput],
    *,
    all_layers: bool,
    strict: bool,
    settings: Settings,
    seconds: float,
    command: str,
    pairs: Sequence[Pair] = (),
) -> DiffReport:
    """The worst verdict is the diff's; with all layers the first bad one is named."""
    words = {r.verdict for r in results}
    verdict: VerdictWord = next((word for word in VERDICT_ORDER if word in words), "skipped")
    bad: list[Any] = [r.layer for r in results if r.verdict in FAILING and r.layer is not None]
    return DiffReport(
        verdict=verdict,
        results=tuple(results),
        inputs=tuple(inputs),
        strict=strict,
        seconds=seconds,
        first_bad_layer=bad[0] if all_layers and bad else None,
        tolerance=settings.tolerances or None,
        pairs=tuple(pairs),
        command=command,
    )
