"""Judge what came back for a setup, by the same rules as `diff`: the truth of the case that was called.

The idea: truth and yardstick depend on the case and on how the state was handed on, not on most axes; so
each distinct case has one witness, found by the content of its tensors, and a sweep of fifty configurations
needs a dozen or two. Relations come from the axis: bits that must equal the baseline's, bands that nobody may
write.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from ...capture.case import Case
from ...kernels.contract import Promise
from ...kernels.interface import KernelInfo
from ..axes.axis import Ran, Setup
from ..axes.recase import rows_as, rule_only, starts
from ..axes.schedule import Step, steps_of
from ..judge import judge
from ..soundness import Soundness, soundness_of
from ..threads import threads_for
from ..trial import Trial
from ..verdict import Outcome, Place, Ruling, VerdictWord
from ..witness import Witness
from .attempt import Margins
from .handed import HandedWitness, StochasticWitness
from .lives import life_steps

STATUS_VERDICT: dict[str, VerdictWord] = {
    "error": "error", "crash": "error", "timeout": "timeout", "refused": "skipped", "shape": "fail",
}  # fmt: skip
# Entries of v over all witnesses that are kept (a truth of that size takes 3 GB), and witnesses kept anyway.
KEPT_ENTRIES, LEAST_KEPT = 200_000_000, 3
NO_ERROR: dict[str, float | None] = {"output": None, "state": None}


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """A ruling on one run, with what a sweep wants to know besides."""

    ruling: Ruling
    margins: Margins = Margins()
    place: Place | None = None
    nonfinite: bool = False


class _Known:
    """A case's witness, and those for answers that came in several calls."""

    def __init__(self, witness: Witness, soundness: Soundness) -> None:
        self.witness, self.soundness = witness, soundness
        self.handed: dict[str, Witness] = {}


class Judge:
    """Holds the witnesses of one sweep; not of one kernel."""

    def __init__(self, device: str, seed: int) -> None:
        self.device, self.seed = device, seed
        self._known: dict[str, _Known] = {}
        """By digest, the one used longest ago first."""

    def soundness(self, case: Case) -> Soundness:
        """Whether the input itself is sound."""
        return self._of(case).soundness

    def judge(self, setup: Setup, ran: Ran, info: KernelInfo, further: Sequence[Outcome] = ()) -> Judgement:
        """Rule on one run. further: outcomes that needed other runs (bits against the baseline's)."""
        if ran.status != "ok":
            return _unanswered(ran)
        assert ran.output is not None
        assert ran.state is not None
        with threads_for(setup.case["v"].numel()):
            case, output, state = judged_part(setup, ran.output, ran.state)
            witness, soundness = self._witness(setup, case, columns=info.capabilities.columns)
            capabilities = msgspec.structs.replace(info.capabilities, default_chunk_size=setup.chunk_size)
            if setup.options.get("l2norm") == "before":
                capabilities = msgspec.structs.replace(capabilities, l2norm="before")
            trial = Trial(witness, msgspec.structs.replace(info, capabilities=capabilities), output, state)
            outcomes = [*ran.further, *guard_outcome(ran), *further]
            ruling = judge(trial, soundness, outcomes)
            place = ruling.first_nonfinite or ruling.worst_tile or _place_of(ruling)
            return Judgement(
                ruling=ruling,
                margins=_margins(trial, ruling),
                place=place,
                nonfinite=ruling.verdict == "fail" and ruling.first_nonfinite is not None,
            )

    def _witness(self, setup: Setup, case: Case, *, columns: bool) -> tuple[Witness, Soundness]:
        """The witness of what is judged, with the hand-over that the setup makes."""
        known = self._of(case)
        steps = judged_steps(setup, columns=columns)
        dtype = setup.state_dtype or "float32"
        witness = known.witness
        if len(steps) > 1 or dtype != "float32":
            key = f"{dtype} {steps}"
            if key not in known.handed:
                known.handed[key] = HandedWitness(known.witness, steps, getattr(torch, dtype))
            witness = known.handed[key]
        return (StochasticWitness(witness) if setup.stochastic else witness), known.soundness

    def _of(self, case: Case) -> _Known:
        """What is known of a case; the oldest go where many large ones would fill the memory."""
        key = digest(case)
        known = self._known.pop(key, None)
        if known is None:
            with threads_for(case["v"].numel()):
                witness = Witness(case, device=self.device, seed=self.seed)
                known = _Known(witness, soundness_of(witness))
        self._known[key] = known
        entries = max(1, case["v"].numel())
        while len(self._known) > max(LEAST_KEPT, KEPT_ENTRIES // entries):
            self._known.pop(next(iter(self._known)))
        return known


def digest(case: Case) -> str:
    """Content of a case as far as the truth depends on it."""
    found = hashlib.blake2b(repr(case.options).encode(), digest_size=16)
    for name in sorted(case.tensors):
        tensor = case[name].detach().cpu().contiguous()
        found.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def judged_part(setup: Setup, output: Tensor, state: Tensor) -> tuple[Case, Tensor, Tensor]:
    """The case that is judged, and the rows of the answer that belong to it.

    Where only the case's own sequences are, the others are left in as empty ones, so that every number of a
    sequence is its number in the call.
    """
    if setup.judged == "all":
        return setup.case, output, state
    case, own = rule_only(setup.case), sorted(setup.own)
    kept = torch.tensor([i in own for i in range(case.n_sequences)])
    lengths = [n if i in own else 0 for i, n in enumerate(case.lengths)]
    rows = _rows(case, own)
    judged = rows_as(case, rows, lengths, list(range(case.n_sequences)))
    if judged.get("initial_state") is not None:
        given = judged["initial_state"]
        judged = judged.with_tensors(initial_state=torch.where(kept.view(-1, 1, 1, 1), given, 0))
    answered = torch.where(kept.view(-1, 1, 1, 1).to(state.device), state, 0)
    return judged, output[rows.to(output.device)], answered


def _rows(case: Case, numbers: Sequence[int]) -> Tensor:
    """[R] packed rows of some sequences, in the order given."""
    at = starts(case)
    parts = [torch.arange(at[n], at[n + 1]) for n in numbers]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def own_rows(setup: Setup) -> Tensor:
    """[R] packed rows of the case's own sequences, in the case's order."""
    return _rows(setup.case, setup.own)


def judged_steps(setup: Setup, *, columns: bool = False) -> list[Step]:
    """The schedule of the sequences that are judged. columns: the kernel runs a verify in one call."""
    if setup.life == "prefill":
        steps = steps_of(setup.case.lengths, setup.split, seed=setup.seed)
    else:
        steps = life_steps(setup.case.lengths, setup.life, columns=columns)
    if setup.judged == "all":
        return steps
    kept = [[segment for segment in step if segment[0] in setup.own] for step in steps]
    return [step for step in kept if step]


def _unanswered(ran: Ran) -> Judgement:
    fault = next((o for o in ran.further if o.status == "fires"), None)
    ruling = Ruling(
        verdict=STATUS_VERDICT[ran.status],
        tier=None if fault is None else fault.tier,
        rule=None if fault is None else fault.check,
        reason=ran.message,
        error=NO_ERROR,
        worst_tile=None if fault is None else fault.place,
    )
    return Judgement(ruling=ruling, place=ruling.worst_tile)


def guard_outcome(ran: Ran) -> list[Outcome]:
    """A guard band that was written is a write outside the kernel's own memory."""
    written = ran.evidence.get("guard_written")
    if not written:
        return []
    first = written[0]
    reason = (
        f"{first['bytes']} bytes {first['side']} {first['buffer']} were written, outside it"
        f"{f'; {len(written)} bands in all' if len(written) > 1 else ''}"
    )
    place = Place(tensor="state" if "state" in str(first["buffer"]) else "output", class_="wrong")
    return [Outcome(check="fresh-memory", tier=4, status="fires", reason=reason, place=place)]


def same_bits(relation: str, promise: Promise, mine: tuple[Setup, Ran], other: tuple[Setup, Ran]) -> Outcome:
    """Whether the case's own sequences have the bits that they have in another run.

    Where the contract promises it, other bits are a fault; where it is merely observed they are named.
    """
    for tensor in ("output", "state"):
        place = _first_difference(tensor, mine, other)
        if place is None:
            continue
        where = f"sequence {place.sequence}, head {place.head}" + (
            "" if place.token is None else f", token {place.token}"
        )
        reason = f"{relation}: {tensor} has other bits than in the run it must equal, first at {where}"
        if promise != "promised":
            return Outcome(check=relation, tier=4, status="not-applicable", reason=f"{reason} (not promised)")
        return Outcome(check=relation, tier=4, status="fires", reason=reason, place=place)
    return Outcome(check=relation, tier=4, status="ok")


def _first_difference(tensor: str, mine: tuple[Setup, Ran], other: tuple[Setup, Ran]) -> Place | None:
    sides = []
    for setup, ran in (mine, other):
        assert ran.output is not None
        assert ran.state is not None
        sides.append(ran.output[own_rows(setup)] if tensor == "output" else ran.state[list(setup.own)])
    a, b = (x.cpu() for x in sides)
    if a.shape != b.shape or a.dtype != b.dtype:
        return None  # other dtypes are another axis's doing
    differs = ~((a == b) | (torch.isnan(a) & torch.isnan(b))).flatten(2).all(-1)
    found = differs.nonzero()
    if len(found) == 0:
        return None
    row, head = found[0].tolist()
    setup = mine[0]
    if tensor == "state":
        return Place(tensor="state", class_="moves", sequence=setup.own[row], head=head)
    for n in setup.own:
        length = setup.case.lengths[n]
        if row < length:
            chunk = None if setup.chunk_size is None else row // setup.chunk_size
            return Place(tensor="output", class_="moves", sequence=n, head=head, chunk=chunk, token=row)
        row -= length
    return None


def _margins(trial: Trial, ruling: Ruling) -> Margins:
    bound = next(
        (o.numbers.get("error_over_bound") for o in ruling.outcomes if o.check == "running-bound"), None
    )
    share = None
    if trial.state is not None and trial.state.numel():
        share = float(trial.state.abs().max()) / torch.finfo(trial.state.dtype).max
    return Margins(state_share=share, error_over_bound=bound, ratio=ruling.ratio)


def _place_of(ruling: Ruling) -> Place | None:
    return next((o.place for o in ruling.outcomes if o.status == "fires" and o.place is not None), None)
