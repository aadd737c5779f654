"""Judge one verify step: every draft row's output, and the state in every column.

The idea: the state in column t is the final state of the call's first t + 1 tokens. So a step is judged as
a series of ordinary cases, the same sequences cut to 1, 2, 3, ... tokens, by the rules that any kernel is
judged by; the first column that is wrong names the place. Slots that no token of the call owns must keep
their bits: the column that was read among them, unless a token's state belongs there.

Leaves to others: what a wrong column looks like (`diagnose`), sequences of steps (`speculation`).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from ...capture.case import Case
from ...capture.columns import columns_of, start_slots
from ...kernels.interface import KernelInfo
from ..axes.recase import rows_as, rule_only
from ..judge import judge
from ..soundness import soundness_of
from ..trial import Trial
from ..verdict import VERDICT_ORDER, Outcome, Place, Ruling
from ..witness import Witness
from .diagnose import looks_like

NAME, TIER = "columns", 4
NO_ERROR: dict[str, float | None] = {"output": None, "state": None}


def judge_step(
    case: Case, info: KernelInfo, outputs: Mapping[str, Tensor], *, device: str = "cpu", seed: int = 0
) -> Ruling:
    """Rule on a kernel's answer to one verify step.

    case: with pool, slot_indices [N, columns], num_accepted [N]. outputs: `output` [T, HV, V] and `pool`
    [slots, HV, K, V] as the kernel left it.
    """
    fault = _shape(case, outputs)
    if fault is not None:
        return _ruling_of(fault)
    slots = check_slots(case, outputs["pool"])
    rulings = []
    for column in range(max(live_lengths(case), default=0)):
        ruling = _judge_column(case, info, outputs, column, device, seed)
        rulings.append(ruling)
        if ruling.verdict in ("fail", "out-of-contract"):
            break
    worst = min(rulings, key=lambda r: VERDICT_ORDER.index(r.verdict), default=None)
    if worst is not None and worst.verdict == "out-of-contract":
        return worst
    if slots.status == "fires" and (worst is None or worst.verdict != "fail"):
        ruling = _ruling_of(slots) if worst is None else _fired(worst, slots)
        return _explained(case, outputs, ruling)
    if worst is None:
        return msgspec.structs.replace(_ruling_of(slots), verdict="pass", reason="no sequence has a token")
    worst = msgspec.structs.replace(worst, outcomes=(*worst.outcomes, slots))
    return _explained(case, outputs, worst) if worst.verdict == "fail" else worst


def live_lengths(case: Case) -> list[int]:
    """Tokens of each sequence that the call works on: none of a padded row's."""
    padded = (start_slots(case.tensors) < 0).tolist()
    return [0 if skip else n for n, skip in zip(case.lengths, padded, strict=True)]


def check_slots(case: Case, after: Tensor) -> Outcome:
    """Slots without an owner among the call's tokens keep their bits, whatever they hold."""
    before = case["pool"].cpu()
    columns = columns_of(case.tensors).cpu()
    owned = torch.zeros(before.shape[0], dtype=torch.bool)
    for row, length in zip(columns, live_lengths(case), strict=True):
        owned[row[:length][row[:length] >= 0]] = True
    now = after.cpu().to(before.dtype)
    kept = ((before == now) | (torch.isnan(before) & torch.isnan(now))).flatten(2).all(-1)
    changed = (~kept & ~owned[:, None]).nonzero()
    if len(changed) == 0:
        return Outcome(check=NAME, tier=TIER, status="ok", numbers={"slots": int((~owned).sum())})
    slot, head = changed[0].tolist()
    whose = (columns == slot).nonzero()
    place = Place(tensor="state", class_="wrong", head=head)
    words = "which is no sequence's"
    if len(whose):
        sequence, column = whose[0].tolist()
        place = Place(tensor="state", class_="wrong", sequence=sequence, head=head, token=column)
        words = f"column {column} of sequence {sequence}, to which no token of this call belongs,"
    return Outcome(
        check=NAME, tier=TIER, status="fires", place=place,
        reason=f"slot {slot}, {words} was written (head {head}, {len(changed)} rows in all)",
        numbers={"slot": slot, "rows": len(changed)},
    )  # fmt: skip


def cut_case(case: Case, column: int) -> tuple[Case, Tensor]:
    """The rule's case of the first column + 1 tokens of every live sequence, and its packed rows [R]."""
    starts = case["cu_seqlens"].tolist()
    lengths = [min(n, column + 1) for n in live_lengths(case)]
    rows = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, lengths, strict=False)])
    whole = rule_only(case)
    return rows_as(whole, rows, lengths, list(range(len(lengths)))), rows


def _judge_column(
    case: Case, info: KernelInfo, outputs: Mapping[str, Tensor], column: int, device: str, seed: int
) -> Ruling:
    """The outputs up to a token, and the states in its column (a shorter sequence's last one)."""
    cut, rows = cut_case(case, column)
    witness = Witness(cut, device=device, seed=seed)
    columns = columns_of(case.tensors).cpu()
    last = torch.tensor([min(n, column + 1) for n in live_lengths(case)]) - 1
    at = columns.gather(1, last.clamp(min=0)[:, None])[:, 0]
    pool = outputs["pool"].to(witness.device)
    state = pool[at.clamp(min=0).to(pool.device)].clone()
    # Nothing is kept of a padded row, an empty sequence, or a token whose column owns no slot.
    nothing = (at < 0) | (last < 0)
    output = outputs["output"].to(witness.device)[rows.to(witness.device)]
    trial = Trial(witness, info, output, state)
    state[nothing] = trial.truth[1][nothing.to(witness.device)].to(state.dtype)
    ruling = judge(trial, soundness_of(witness), [])
    if ruling.verdict not in ("fail", "suspect"):
        return ruling
    return msgspec.structs.replace(
        ruling,
        reason=f"after token {column} of the step: {ruling.reason}",
        worst_tile=_in_column(ruling.worst_tile, column),
        first_nonfinite=_in_column(ruling.first_nonfinite, column),
    )


def _in_column(place: Place | None, column: int) -> Place | None:
    """A state's place gets its column."""
    if place is None or place.tensor != "state" or place.token is not None:
        return place
    return msgspec.structs.replace(place, token=column)


def _shape(case: Case, outputs: Mapping[str, Tensor]) -> Outcome | None:
    """The first of output and pool that is missing or has another shape."""
    for name, shape, tensor in (("output", case["v"].shape, "output"), ("pool", case["pool"].shape, "state")):
        got = outputs.get(name)
        if got is None or got.shape != shape or not got.dtype.is_floating_point:
            came = "nothing" if got is None else f"{got.dtype} {list(got.shape)}"
            reason = f"{name} came back as {came}, not {list(shape)}"
            place = Place(tensor=tensor, class_="wrong")
            return Outcome(check="shape", tier=0, status="fires", reason=reason, place=place)
    return None


def _ruling_of(outcome: Outcome) -> Ruling:
    return Ruling(
        verdict="fail" if outcome.status == "fires" else "pass", tier=outcome.tier, rule=outcome.check,
        reason=outcome.reason, worst_tile=outcome.place, error=NO_ERROR, outcomes=(outcome,),
    )  # fmt: skip


def _fired(ruling: Ruling, outcome: Outcome) -> Ruling:
    """A ruling that a further outcome turns into a failure."""
    return msgspec.structs.replace(
        ruling, verdict="fail", tier=outcome.tier, rule=outcome.check, reason=outcome.reason,
        worst_tile=outcome.place, outcomes=(*ruling.outcomes, outcome),
    )  # fmt: skip


def _explained(case: Case, outputs: Mapping[str, Tensor], ruling: Ruling) -> Ruling:
    """The reason, and what the departure looks like where one mistake of bookkeeping explains it."""
    guess = looks_like(case, outputs)
    if not guess:
        return ruling
    return msgspec.structs.replace(ruling, reason=f"{ruling.reason}; it looks as if {guess}")


def read_next(case: Case, pool: Tensor, accepted: Tensor) -> Tensor:
    """[N, HV, K, V]: what the next step reads where `accepted` [N] tokens of this one were accepted."""
    columns = columns_of(case.tensors).cpu()
    at = columns.gather(1, (accepted.cpu().long() - 1)[:, None])[:, 0]
    states = pool[at.clamp(min=0).to(pool.device)].clone()
    states[(at < 0).to(pool.device)] = 0
    return states
