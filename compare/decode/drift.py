"""decode: step a kernel through thousands of tokens and follow its error; twin of `gdncheck decode`.

The idea: one step's error is judged by `diff`. What a served model suffers is what thousands of steps add up
to, and that depends on where the loop rounds: the state in the pool between steps, beta, the normalised
keys. So the same stream is decoded under each rounding profile; at every checkpoint the state is held
against the float64 recurrence, in units of what an honest kernel errs there under the same profile, and
against the bound that the declared dtypes give.

Leaves to others: the stream (`stream`), truth and honest runs (`witness`), printing (`report`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...capture.case import Case
from ...capture.casefile import read_case
from ...capture.errors import BadInput, CannotRun, GdncheckError
from ...kernels.interface import KernelCall, KernelInfo, RunResult
from ...kernels.pool import KernelHandle, WorkerPool
from ...kernels.registry import default_kernels
from ..checks import shape
from ..checks.emulation_ratio import ratios
from ..inputs import call_of
from ..judge import judge
from ..nonfinite import compare_masks
from ..report_words import number
from ..session import STATUS_VERDICT
from ..soundness import Soundness, soundness_of
from ..threads import threads_for
from ..tiles import map_states, row_errors
from ..trial import Measured, Trial
from ..verdict import VERDICT_ORDER, Outcome, Place, Ruling, VerdictWord, exit_status_of
from .stream import (
    DTYPES,
    L2norm,
    Profile,
    checkpoints_of,
    first_steps,
    profiles_of,
    rows_between,
    stream_of,
    under_profile,
)
from .witness import DecodeWitness

NAME, TIER = "drift", 3
NO_ERROR: dict[str, float | None] = {"output": None, "state": None}


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """The errors after so many steps: relative RMS of the worst (sequence, head)."""

    step: int
    pure: float
    """State, against the float64 recurrence of the stream as it is: the drift."""
    state: float
    """State, against the float64 recurrence under the profile (beta as given, declared clauses)."""
    honest: float
    """The largest that honest runs err in this profile."""
    bound: float | None
    """How far the declared dtypes' rounding can take it; None where nothing bounds it."""
    output: float
    """Outputs since the checkpoint before, against the truth under the profile."""
    departs: bool


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel under one rounding profile."""

    kernel: str
    profile: Profile
    ruling: Ruling
    points: tuple[Point, ...] = ()
    seconds: float | None = None
    evidence: dict[str, Any] = {}

    @property
    def verdict(self) -> VerdictWord:
        return self.ruling.verdict


class DecodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a decode run found out."""

    verdict: VerdictWord
    case: str
    steps: int
    sequences: int
    heads: int
    drifts: tuple[Drift, ...]
    whole: bool = False
    strict: bool = False
    seconds: float = 0.0
    command: str = ""

    @property
    def exit_status(self) -> int:
        """0, 1 or 3 of the design."""
        named = any(d.ruling.contract_differences for d in self.drifts)
        return exit_status_of((d.verdict for d in self.drifts), strict=self.strict, differences=named)


def decode(
    case: Case | Path | str,
    *,
    kernels: Sequence[str] | None = None,
    steps: int = 4096,
    state_dtypes: Sequence[str] = (),
    beta_dtypes: Sequence[str] = (),
    l2norm: Sequence[L2norm] = (),
    whole: bool = False,
    device: str = "auto",
    time_limit: float = 300.0,
    seed: int = 0,
    strict: bool = False,
    sources: Mapping[str, str] | None = None,
    progress: Callable[[str], None] | None = None,
    command: str = "",
) -> DecodeReport:
    """Decode a case's sequences for `steps` tokens, under every combination of the rounding profiles.

    kernels: names; None: what is installed. state_dtypes: that the state is kept in between steps (fp32,
    bf16, fp16); beta_dtypes: that beta is given in; l2norm: for raw q and k, in_kernel or before.
    whole: one call per checkpoint instead of one per token: the drift of a prefill.
    Raises BadInput for wrong arguments, CannotRun where no kernel could run.
    """
    started = time.monotonic()
    given = case if isinstance(case, Case) else read_case(case)
    names = list(kernels) if kernels else [n for n in default_kernels() if ".recurrent" in n]
    if not names:
        raise CannotRun("no kernel is installed that decodes; name one with --kernel, or see gdncheck doctor")
    if whole and any(DTYPES.get(name) != torch.float32 for name in state_dtypes):
        raise BadInput("--whole keeps the state in the kernel, so --state-dtype has no effect; leave one out")
    profiles = profiles_of(state_dtypes, beta_dtypes, list(l2norm), raw=given.options.qk == "raw")
    run = _Run(stream_of(given, steps), whole=whole, device=device, seed=seed)
    say = progress or (lambda text: None)
    drifts: list[Drift] = []
    with WorkerPool(device=device, time_limit=time_limit, sources=sources) as pool:
        for handle in [pool.begin(name) for name in names]:
            for profile in profiles:
                say(f"{handle.spec.name}: {profile.text}")
                drifts.append(run.drift(handle, profile, asked=bool(kernels)))
    words = {d.verdict for d in drifts}
    label = given.label
    return DecodeReport(
        verdict=next((word for word in VERDICT_ORDER if word in words), "skipped"),
        case=str(given.path) if given.path is not None else label,
        steps=steps, sequences=run.stream.n_sequences, heads=run.stream["v"].shape[1],
        drifts=tuple(drifts), whole=whole, strict=strict, seconds=time.monotonic() - started, command=command,
    )  # fmt: skip


class _Run:
    """What all kernels and profiles of one decode share."""

    def __init__(self, stream: Case, *, whole: bool, device: str, seed: int) -> None:
        self.stream, self.whole, self.seed = stream, whole, seed
        self.device = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
        self.checkpoints = checkpoints_of(stream.lengths[0])
        self._witnesses: dict[tuple[str, str | None], tuple[DecodeWitness, Soundness]] = {}

    def witness(self, profile: Profile) -> tuple[DecodeWitness, Soundness]:
        """The witness of the stream under a profile, made once."""
        key = (profile.state, profile.beta)
        if key not in self._witnesses:
            witness = DecodeWitness(
                under_profile(self.stream, profile), DTYPES[profile.state], self.checkpoints,
                rounds=not self.whole, device=self.device, seed=self.seed,
            )  # fmt: skip
            self._witnesses[key] = witness, soundness_of(witness)
        return self._witnesses[key]

    def drift(self, handle: KernelHandle, profile: Profile, *, asked: bool) -> Drift:
        """Run one kernel under one profile and rule on it."""
        try:
            info = handle.info
        except GdncheckError as error:
            if asked:
                raise
            return Drift(kernel=handle.spec.name, profile=profile, ruling=_word("skipped", str(error)))
        steps, limit = self.stream.lengths[0], info.capabilities.max_tokens_cpu
        if not asked and info.environment.get("interpreted") and limit is not None and steps > limit:
            reason = f"{steps} steps are slow in Triton's interpreter (limit {limit}); name it with --kernel"
            return Drift(kernel=info.name, profile=profile, ruling=_word("skipped", reason))
        if not self.whole and info.capabilities.default_chunk_size is not None:
            reason = f"{info.name} works in chunks and is no decode kernel; add --whole for a prefill's drift"
            return Drift(kernel=info.name, profile=profile, ruling=_word("skipped", reason))
        with threads_for(self.stream["v"].numel()):
            witness, soundness = self.witness(profile)
            result, states = self._answer(handle, witness.case, profile)
            if result.status != "ok":
                word, reason = STATUS_VERDICT[result.status], result.message or result.status
                return Drift(kernel=info.name, profile=profile, ruling=_word(word, reason))
            fault = shape.check(witness.inputs, result.outputs)
            if fault.status == "fires" or states is None:
                reason = fault.reason or "the kernel returned no states on the way"
                return Drift(kernel=info.name, profile=profile, ruling=_word("fail", reason, fault))
            return self._judged(info, profile, witness, soundness, result, states)

    def _answer(
        self, handle: KernelHandle, case: Case, profile: Profile
    ) -> tuple[RunResult, list[Tensor] | None]:
        """The result over all steps, and the states at the checkpoints."""
        if not self.whole:
            name = str(DTYPES[profile.state]).removeprefix("torch.")
            options: dict[str, Any] = {"stepwise": True, "keep_states": self.checkpoints, "state_dtype": name}
            result = handle.run([_call(case, profile, options)])[0]
            kept = result.outputs.get("step_states")
            return result, None if kept is None else list(kept)
        results = handle.run([_call(first_steps(case, n), profile, {}) for n in self.checkpoints])
        bad = next((r for r in results if r.status != "ok" or "final_state" not in r.outputs), None)
        if bad is not None:
            return bad, None
        return results[-1], [r.outputs["final_state"] for r in results]

    def _judged(
        self, info: KernelInfo, profile: Profile, witness: DecodeWitness, soundness: Soundness,
        result: RunResult, states: list[Tensor],
    ) -> Drift:  # fmt: skip
        capabilities = info.capabilities
        if profile.l2norm == "before":
            capabilities = msgspec.structs.replace(capabilities, l2norm="before")
        named = msgspec.structs.replace(info, capabilities=capabilities)
        trial = Trial(witness, named, result.outputs["output"], result.outputs["final_state"])
        points: list[Point] = []
        ruling = _word("out-of-contract", soundness.reason)
        if soundness.sound:
            points = self._points(trial, states)
            ruling = _with_drift(judge(trial, soundness, []), points)
        return Drift(
            kernel=info.name, profile=profile, ruling=ruling, points=tuple(points), seconds=result.seconds,
            evidence=result.evidence,
        )  # fmt: skip

    def _points(self, trial: Trial, states: list[Tensor]) -> list[Point]:
        """The curve: every checkpoint's state against the truth, the honest runs and the bound."""
        witness = trial.witness
        assert isinstance(witness, DecodeWitness)
        pure = self.witness(Profile())[0].states()
        true, scales = witness.states(trial.clauses), witness.state_scales(trial)
        limits, tiles = witness.state_limits(trial), map_states(witness.inputs.n_sequences, witness.device)
        points, before = [], 0
        for m, step in enumerate(self.checkpoints):
            got = states[m].to(witness.device)
            measured = Measured(got, true[m], tiles, row_errors(got, true[m]), compare_masks(got, true[m]))
            table = ratios(measured, scales[m])
            size = true[m].flatten(2).norm(dim=-1)
            over = measured.rows.square.sqrt() > limits[m]
            bound = limits[m] / size.clamp_min(1e-300)
            rows = rows_between(witness.case, before, step).to(trial.output.device)
            points.append(
                Point(
                    step=step,
                    pure=relative(got, pure[m]),
                    state=relative(got, true[m]),
                    honest=_largest(scales[m].rms, true[m]),
                    bound=float(bound.max()) if bool(torch.isfinite(bound).all()) else None,
                    output=relative(trial.output[rows], trial.truth[0][rows], rows=True),
                    departs=bool(table.bad.any() | over.any()) or bool(measured.masks.n_unexplained),
                )
            )
            before = step
        return points


def relative(got: Tensor, want: Tensor, *, rows: bool = False) -> float:
    """Relative error of the worst (sequence, head); with rows, of the worst head over all [R, HV, V]."""
    got, want = got.double(), want.double()
    if rows:
        got, want = got.movedim(0, 1)[None], want.movedim(0, 1)[None]
    error = (got - want).flatten(2).norm(dim=-1)
    size = want.flatten(2).norm(dim=-1)
    if not bool(torch.isfinite(error).all()):
        return float("nan")
    return float(torch.where(error > 0, error / size.clamp_min(1e-300), 0.0).max())


def _largest(rms: Tensor, true: Tensor) -> float:
    """[P, HV] RMS errors of states as the largest relative one; a pool of small states counts as a whole."""
    size = true.square().flatten(2).mean(-1).sqrt()
    if rms.shape[0] != size.shape[0]:
        size = size.square().mean(0, keepdim=True).sqrt()
    return float((rms / size.clamp_min(1e-300)).max())


def _call(case: Case, profile: Profile, options: dict[str, Any]) -> KernelCall:
    more = {"l2norm": profile.l2norm} if profile.l2norm else {}
    return call_of(case, **options, **more)


def _word(verdict: VerdictWord, reason: str, outcome: Outcome | None = None) -> Ruling:
    if outcome is None:
        return Ruling(verdict=verdict, reason=reason, error=NO_ERROR)
    return Ruling(
        verdict=verdict, tier=outcome.tier, rule=outcome.check, reason=reason, error=NO_ERROR,
        worst_tile=outcome.place, outcomes=(outcome,),
    )  # fmt: skip


def _with_drift(ruling: Ruling, points: list[Point]) -> Ruling:
    """The ruling on the whole run; a checkpoint that departs fails by itself and is named in any case."""
    first = next((p for p in points if p.departs), None)
    if first is None or ruling.verdict == "out-of-contract":
        return ruling
    words = (
        f"after step {first.step} the state is off by {number(first.state)}, honest runs by "
        f"{number(first.honest)} at most"
    )
    if ruling.verdict == "fail":
        return msgspec.structs.replace(ruling, reason=f"{words}; {ruling.reason}")
    place = Place(tensor="state", class_="wrong", token=first.step - 1)
    outcome = Outcome(check=NAME, tier=TIER, status="fires", reason=words, place=place)
    return msgspec.structs.replace(
        ruling, verdict="fail", tier=TIER, rule=NAME, reason=words, worst_tile=place,
        outcomes=(*ruling.outcomes, outcome),
    )  # fmt: skip
