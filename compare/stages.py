"""Stages: which stage of a chunk kernel makes an error, and which only hands one on.

The idea: a stage is measured twice. Its value in the kernel's own chain tells whether an error is there;
its value when it is fed the truth's inputs, rounded to what it takes, tells whether the error is its own.
Both are judged as tier 3 judges results: against the float64 stage, in units of what the emulation errs at
the same stage in the same situation, per (sequence, head, chunk).

Leaves to others: running one stage (adapters), what an honest run errs (`stage_yardstick`), limits
(`checks.emulation_ratio`), printing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..kernels.interface import KernelCall, RunOptions, RunResult
from .checks.emulation_ratio import Ratios, ratios, wrong_rows
from .inputs import call_of
from .nonfinite import compare_masks
from .report_words import number, where
from .stage_yardstick import GIVES, STAGES, StageWitness, stage_witness
from .tiles import row_errors
from .trial import Measured, Trial
from .verdict import Place, PlaceClass, StageFinding
from .yardstick import Scale


@dataclass(frozen=True)
class Assessed:
    """One tensor of a stage against its float64 value."""

    departs: bool
    ratio: float
    """Largest ratio to the emulation's error: of a tile's RMS, its largest entry, or one row."""
    place: Place | None


NOTHING = Assessed(False, 0.0, None)


class StageReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `diff --stages` found for one kernel and case."""

    findings: tuple[StageFinding, ...] = ()
    note: str = ""
    """Why there are no findings."""

    @property
    def first(self) -> StageFinding | None:
        """The first stage that departs."""
        return next((f for f in self.findings if f.made or f.handed_on), None)

    @property
    def reason(self) -> str:
        """One sentence: where the error is made, and where it goes."""
        made = [f for f in self.findings if f.made]
        handed = ", ".join(f.stage for f in self.findings if f.handed_on and not f.made)
        first = self.first
        if first is None:
            return ""
        if not made:
            return (
                f"stage {first.stage} is the first that departs, by errors handed on from stages that are "
                "within their limits"
            )
        words = f"stage {made[0].stage} makes the error: {made[0].reason}"
        if len(made) > 1:
            words += f"; so does {', '.join(f.stage for f in made[1:])}"
        return words + (f"; handed on through {handed}" if handed else "")


def compare_stages(runner: Any, trial: Trial) -> StageReport:
    """Run a kernel's stage functions on the case of a trial and judge each.

    runner: an open kernel (`session.Runner`). Raises nothing for what a kernel does: a report without
    findings says why in its note.
    """
    reason = _not_comparable(trial)
    if reason:
        return StageReport(note=reason)
    call = _stage_call(trial, {}, {"stages": True})
    chain = runner.run([call])[0]
    if chain.status != "ok":
        return StageReport(note=f"its stage functions gave no result: {chain.message or chain.status}")
    present = tuple(s for s in STAGES if any(name in chain.outputs for name in GIVES[s]))
    witness = stage_witness(trial, fused="kkt" not in chain.outputs)
    if witness.reason:
        return StageReport(note=witness.reason)
    fed = _fed(runner, trial, witness, present)
    return StageReport(findings=tuple(_judge(trial, witness, present, chain.outputs, fed)))


def _not_comparable(trial: Trial) -> str:
    if not trial.info.capabilities.stages:
        return f"{trial.info.name} has no stage functions to compare"
    if trial.witness.inputs.g.ndim == 3:
        return "stages are compared for one decay per head, not per key channel"
    if trial.witness.inputs.n_tokens == 0:
        return "the case has no tokens"
    return ""


def _stage_call(trial: Trial, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> KernelCall:
    first = call_of(trial.witness.case)
    options: RunOptions = msgspec.structs.replace(first.options, extra=extra)
    moved = {name: value.cpu() for name, value in tensors.items()}
    return KernelCall(tensors={**first.tensors, **moved}, options=options)


def _fed(runner: Any, trial: Trial, witness: StageWitness, present: tuple[str, ...]) -> dict[str, RunResult]:
    """Each stage's result when it reads the truth's values."""
    calls = [
        _stage_call(trial, {name: witness.truth[name] for name in witness.reads(stage)}, {"stage": stage})
        for stage in present
    ]
    return dict(zip(present, runner.run(calls), strict=True))


def _judge(
    trial: Trial,
    witness: StageWitness,
    present: tuple[str, ...],
    chain: Mapping[str, Tensor],
    fed: Mapping[str, RunResult],
) -> list[StageFinding]:
    findings = []
    departed: set[str] = set()
    for stage in present:
        in_chain = _assess_stage(witness, stage, chain, witness.truth, witness.chain_scale)
        alone = NOTHING
        if fed[stage].status == "ok":
            alone = _assess_stage(witness, stage, fed[stage].outputs, witness.truth, witness.fed_scale)
        reads_bad = bool(departed & set(witness.reads(stage)))
        made = alone.departs
        if in_chain.departs and not reads_bad and not made:
            # Either its inputs' errors, each within its limit, add up here, or it errs on these inputs only.
            made = fed[stage].status != "ok" or _errs_on_its_own_inputs(witness, stage, chain)
        handed_on = in_chain.departs and (reads_bad or not made)
        if in_chain.departs:
            departed |= {name for name in GIVES[stage] if _departs(witness, name, chain)}
        shown = alone if alone.departs else in_chain
        findings.append(
            StageFinding(
                stage=stage, made=made, handed_on=handed_on, ratio=shown.ratio,
                place=shown.place if made or handed_on else None,
                reason=_words(stage, shown, made, handed_on),
                ratio_fed=alone.ratio, ratio_chain=in_chain.ratio,
            )
        )  # fmt: skip
    return findings


def _words(stage: str, shown: Assessed, made: bool, handed_on: bool) -> str:
    if not (made or handed_on) or shown.place is None:
        return ""
    how = "fed the truth's values, it" if made else "in the kernel's chain it"
    size = (
        "is not finite"
        if shown.place.class_ != "wrong"
        else f"errs {number(shown.ratio)} times the emulation"
    )
    return f"{how} {size} at {where(shown.place)}"


def _departs(witness: StageWitness, name: str, chain: Mapping[str, Tensor]) -> bool:
    return _assess(witness, name, chain.get(name), witness.truth[name], witness.chain_scale(name)).departs


def _errs_on_its_own_inputs(witness: StageWitness, stage: str, chain: Mapping[str, Tensor]) -> bool:
    """Against the float64 stage of the very values that the kernel's stage was handed."""
    given = {name: chain[name] for name in witness.reads(stage) if name in chain}
    truth, scale_of = witness.of_given(given)
    return _assess_stage(witness, stage, chain, truth, scale_of).departs


def _assess_stage(
    witness: StageWitness, stage: str, got: Mapping[str, Tensor], truth: Mapping[str, Tensor], scale_of: Any
) -> Assessed:
    """The worst of a stage's tensors; among departing ones the first in the stage's own order."""
    all_of = [
        _assess(witness, name, got.get(name), truth[name], scale_of(name), stage) for name in GIVES[stage]
    ]
    departing = [a for a in all_of if a.departs]
    if departing:
        worst = max(a.ratio for a in departing)
        return Assessed(True, worst, departing[0].place)
    return max(all_of, key=lambda a: a.ratio)


def _assess(
    witness: StageWitness, name: str, got: Tensor | None, want: Tensor, scale: Scale, stage: str | None = None
) -> Assessed:
    """Judge one tensor by tier 3's rule."""
    if got is None:
        return NOTHING
    stage = stage or name
    got = got.to(want.device)
    if got.shape != want.shape:
        return Assessed(True, float("inf"), Place(tensor=stage, class_="wrong"))
    got, want = witness.entries_that_count(name, got, want)
    measured = Measured(got, want, scale.tiles, row_errors(got, want), compare_masks(got, want))
    if measured.masks.n_unexplained:
        row, head = measured.masks.unexplained.nonzero()[0].tolist()
        kind = measured.masks.first_class or "nan"
        return Assessed(True, float("inf"), _place(stage, measured, row, head, kind))
    table = ratios(measured, scale)
    ratio = max(_largest(table.rms), _largest(table.peak), _largest(table.row))
    if not bool(table.bad.any()):
        return Assessed(False, ratio, None)
    return Assessed(True, ratio, _first_wrong(stage, measured, scale, table))


def _largest(table: Tensor) -> float:
    return float(table.max()) if table.numel() else 0.0


def _first_wrong(stage: str, measured: Measured, scale: Scale, table: Ratios) -> Place:
    """The earliest row that is wrong by itself in a tile above its limit, else that tile without a token."""
    pool = scale.pools.pool_of_tile[measured.tiles.tile_of_row]
    in_bad = table.bad[pool]
    rows = (wrong_rows(measured, scale) & in_bad).nonzero()
    if len(rows):
        row, head = rows[0].tolist()
        return _place(stage, measured, row, head, "wrong")
    error = torch.where(in_bad, measured.rows.square, -1.0)
    row, head = divmod(int(error.argmax()), error.shape[1])
    return msgspec.structs.replace(_place(stage, measured, row, head, "wrong"), token=None)


def _place(stage: str, measured: Measured, row: int, head: int, kind: PlaceClass) -> Place:
    """A row under the stage's name; a stored state has a chunk although it has no token."""
    tiles = measured.tiles
    return Place(
        tensor=stage,
        class_=kind,
        sequence=int(tiles.sequence_of_row[row]),
        head=head,
        chunk=None if tiles.chunk is None else int(tiles.chunk[tiles.tile_of_row[row]]),
        token=None if tiles.token_of_row is None else int(tiles.token_of_row[row]),
    )
