"""`diff --op`: kernels of one operation, or of the whole core, against the truth, as `diff` has the rule.

The idea: the same report in the same words; what differs is what is run and what it is held against. Each
kernel name is opened in workers of its own, a chain in one for each operation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from torch import Tensor

from ...capture.case import Case
from ...capture.errors import BadInput, CannotRun
from ...kernels.contract import Contract
from ...kernels.interface import KernelCall, KernelInfo, RunOptions, RunResult
from ...kernels.ops.chains import Chain, chain_of
from ...kernels.pool import KernelHandle, WorkerPool
from ...kernels.registry import (
    DEFAULT_FAMILIES,
    default_kernels,
    installed_version,
    own_kernels,
    resolve,
)
from ..diff import CaseInput, DiffReport, Progress, cases_of, check_arguments, report_of, verdict_device
from ..session import Settings, unanswered
from ..threads import threads_for
from ..verdict import DiffResult, Ruling
from .chain import ChainTrial, Link, examine
from .chain_verdict import chain_ruling
from .inputs import heads_of, op_inputs
from .observed import OBSERVED, observed_outputs
from .op import OpFinding as DomainFinding
from .session import diff_op
from .table import OPS
from .values import given_by, gives, reads

CORE = "core"


def diff_ops(
    op: str,
    case: Case | Path | str | None = None,
    *,
    kernels: Sequence[str] | None = None,
    layer: int | None = None,
    captures: Path | str = "captures",
    device: str = "auto",
    time_limit: float = 300.0,
    seed: int = 0,
    strict: bool = False,
    first: int | None = None,
    sources: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> DiffReport:
    """Run kernels of an operation on a case, a file, a layer or all captured layers, and rule on each.

    op: a name of `table.OPS`, or `core`: kernels are then chains (`kernels.ops.chains`), a function of the
    whole core, or `observed`, what the captured engine itself computed. Other arguments as `compare.diff`.
    Raises BadInput for a wrong file, layer or name; CannotRun where nothing could run.
    """
    if op != CORE and op not in OPS:
        raise BadInput(f"op is {op!r}; use rule, {CORE}, {', '.join(OPS)}")
    started = time.monotonic()
    check_arguments(relations="auto", first=first)
    names = list(kernels) if kernels else default_chains() if op == CORE else default_kernels(op)
    if not names:
        raise CannotRun(f"no kernel of {op} is installed; name one with --kernel")
    say = progress or (lambda text: None)
    results: list[DiffResult] = []
    inputs: list[CaseInput] = []
    with WorkerPool(device=device, time_limit=time_limit, sources=sources) as pool:
        opened = [_Opened(op, name, pool, sources) for name in names]
        for one in cases_of(case, layer, captures, first):
            with threads_for(_size_of(one)):
                say(f"{one.label}: {op}")
                where = verdict_device(device)
                inputs.append(_input_row(op, one, where))
                for kernel in opened:
                    say(f"{one.label}: {kernel.name}")
                    results.append(kernel.judge(one, where, seed))
    return report_of(
        results,
        inputs,
        all_layers=case is None and layer is None,
        strict=strict,
        settings=Settings(seed=seed),
        seconds=time.monotonic() - started,
        command=command,
    )


def default_chains() -> list[str]:
    """The cores that a command runs when none is named: of the families that are installed."""
    packages = {key.partition(".")[0]: adapter.package for key, adapter in own_kernels().items()}
    return [f"{f}.core" for f in DEFAULT_FAMILIES if installed_version(packages[f]) is not None]


class _Opened:
    """One kernel name with its workers: one, or one for each operation of a chain."""

    def __init__(self, op: str, name: str, pool: WorkerPool, sources: Mapping[str, str] | None) -> None:
        self.op, self.name = op, name
        self.handles: dict[str, KernelHandle] = {}
        if op == CORE:
            if name == OBSERVED:
                return
            chain: Chain = chain_of(name, sources=sources)
            self.name = chain.name
            self.handles = {step: pool.begin(spec) for step, spec in chain.steps}
            return
        spec = resolve(name, sources=sources)
        if spec.by_import_path:
            spec = msgspec.structs.replace(spec, op=op)
        elif spec.attribute != op:
            raise BadInput(f"{name} is a kernel of {spec.attribute}; --op {op} needs a kernel of {op}")
        self.handles = {op: pool.begin(spec)}

    def judge(self, case: Case, device: str, seed: int) -> DiffResult:
        if self.op == CORE:
            return judge_core(self.name, self.handles, case, device=device, seed=seed)
        handle = self.handles[self.op]
        answer = diff_op(handle, OPS[self.op], op_inputs(case, self.op, device), seed=seed)
        return _result(handle.name, case, answer.ruling, seconds=answer.seconds, evidence=answer.evidence)


def judge_core(
    name: str, handles: Mapping[str, KernelHandle], case: Case, *, device: str, seed: int
) -> DiffResult:
    """Rule on a chain, on a core that is one call, or on what the engine computed."""
    if case.get("conv_input") is None or case.get("z") is None or case.get("norm_weight") is None:
        raise BadInput(
            f"{case.label}: --op core needs a case with the core's tensors; capture with --what core"
        )
    if name == OBSERVED:
        return _judge_shown(name, case, observed_outputs(case), _nobody(name), None, {}, device, seed)
    if set(handles) == {CORE}:
        handle = handles[CORE]
        result = handle.run([_core_call(case)])[0]
        if result.status != "ok":
            return _result(handle.name, case, unanswered(result), evidence=result.evidence)
        outputs = result.outputs
        return _judge_shown(
            handle.name, case, outputs, handle.info, result.seconds, result.evidence, device, seed
        )
    links = [Link(op, handle.name, handle.info, handle) for op, handle in handles.items()]
    trial = ChainTrial(case, links, device=device, seed=seed)
    findings, errors = examine(trial, trial.run())
    return msgspec.structs.replace(
        _result(name, case, chain_ruling(trial, findings, errors)), ops=tuple(findings)
    )


def _judge_shown(
    name: str,
    case: Case,
    outputs: Mapping[str, Tensor],
    info: KernelInfo,
    seconds: float | None,
    evidence: Mapping[str, object],
    device: str,
    seed: int,
) -> DiffResult:
    """Rule on values that a core shows; operations whose values are missing are judged with the next."""
    ops = shown_ops(outputs)
    links = [Link(op, name, info, None) for op in ops]
    trial = ChainTrial(case, links, device=device, seed=seed)
    result = RunResult(status="ok", outputs=dict(outputs))
    findings, errors = examine(trial, trial.take(result))
    ruling = chain_ruling(trial, findings, errors)
    answer = _result(name, case, ruling, seconds=seconds, evidence=dict(evidence))
    return msgspec.structs.replace(answer, ops=tuple(findings))


def shown_ops(outputs: Mapping[str, object]) -> tuple[str, ...]:
    """The operations that a core's shown values tell apart. Raises BadInput where it shows too little."""
    ops = tuple(
        op for op in ("conv", "split", "gate", "rule", "norm") if all(name in outputs for name in gives(op))
    )
    if ops != ("conv", "split", "gate", "rule", "norm"):
        raise BadInput(
            "a core that is one call must show conv_output, q, k, v, g, beta, output, final_state, "
            f"final_conv_state and normed; this one shows {', '.join(outputs)}"
        )
    return ops


def _core_call(case: Case) -> KernelCall:
    given = given_by(case, "cpu")
    tensors = {name: given[name] for name in reads(CORE) if name in given}
    return KernelCall(
        tensors=tensors,
        options=RunOptions(heads=heads_of(case), eps=case.options.rms_eps, scale=case.scale),
    )


def _nobody(name: str) -> KernelInfo:
    return KernelInfo(name=name, contract=Contract(kernel=name))


def _result(
    name: str,
    case: Case,
    ruling: Ruling,
    *,
    seconds: float | None = None,
    evidence: Mapping[str, object] | None = None,
) -> DiffResult:
    label = str(case.path) if case.path is not None else case.label
    return DiffResult(
        kernel=name, case=label, layer=case.origin.layer, ruling=ruling, seconds=seconds,
        evidence=dict(evidence or {}),
    )  # fmt: skip


def _size_of(case: Case) -> int:
    return max((tensor.numel() for tensor in case.tensors.values()), default=0)


def _input_row(op: str, case: Case, device: str) -> CaseInput:
    """What the report says about the input of the operation (of the convolution, for the core)."""
    started = time.monotonic()
    judged = "conv" if op == CORE else op
    own = op_inputs(case, judged, device)
    main = own.tensors[OPS[judged].reads]
    found: Sequence[DomainFinding] = OPS[judged].domain(own, {})
    return CaseInput(
        case=str(case.path) if case.path is not None else case.label,
        layer=case.origin.layer,
        tokens=main.shape[0],
        sequences=len(own.cu_seqlens) - 1,
        heads=own.heads[2] if own.heads else main.shape[1] if main.ndim > 1 else 1,
        dtype=str(main.dtype).removeprefix("torch."),
        sound=not found,
        reason=f"the input is outside the domain: {found[0].text}" if found else "",
        truth_seconds=time.monotonic() - started,
    )
