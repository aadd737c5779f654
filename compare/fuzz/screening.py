"""Screening: many answers of one kernel judged at once; those that something is wrong with are named.

The idea: the checks of `judge` run on the joined case. If none fires, every case passes, by the same rules
as alone. If one does, the cases that its tables show are set aside (their answers replaced by the truth), and
the checks run again, until nothing fires; what was set aside is judged alone by the sweep's judge, which
gives the verdict. So screening decides nothing but which cases are plainly sound.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from ...capture.case import Case
from ...kernels.interface import KernelInfo
from ..axes.axis import Ran, Setup
from ..axes.schedule import Step
from ..checks.emulation_ratio import ratios
from ..judge import CASE_CHECKS
from ..soundness import soundness_of
from ..sweep.judging import guard_outcome, judged_part, judged_steps
from ..threads import threads_for
from ..trial import TENSORS, Trial
from ..verdict import Place
from .feedback import measured_feedback
from .joined import Joined, join

# Honest runs of the first look; the share of cases that fail it above which it is left out, and after how
# many.
FEW_RUNS, WASTED, ENOUGH = 3, 0.4, 200


class Answer(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One case's answer, cut to what is judged."""

    number: int
    setup: Setup
    ran: Ran
    case: Case
    output: Tensor
    state: Tensor
    steps: list[Step]
    exact: bool
    """The case is of an exact family."""

    @property
    def key(self) -> tuple[object, ...]:
        """What answers must share to be judged together."""
        case, setup = self.case, self.setup
        states = case.get("initial_state")
        return (
            tuple((n, case[n].dtype, tuple(case[n].shape[1:])) for n in ("q", "v", "g", "beta")),
            None if states is None or states.dtype == torch.float32 else states.dtype,
            case.options, setup.chunk_size, setup.state_dtype, setup.options.get("l2norm"),
            setup.stochastic, self.output.dtype, self.state.dtype, self.exact,
        )  # fmt: skip


class Screened(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What screening says of one answer."""

    plain: bool
    """Nothing fires: the verdict is pass."""
    feedback: dict[str, float] = {}
    """Feedback numbers by name, see `feedback`."""


def answer_of(number: int, setup: Setup, ran: Ran, *, exact: bool, columns: bool) -> Answer:
    """Cut an answer to what is judged. ran: with status ok. columns: the kernel verifies in one call."""
    assert ran.output is not None
    assert ran.state is not None
    case, output, state = judged_part(setup, ran.output, ran.state)
    return Answer(
        number=number, setup=setup, ran=ran, case=case, output=output, state=state,
        steps=judged_steps(setup, columns=columns),
        # Integers that float32 holds need not be so in the pool's dtype: then it is a case like any other.
        exact=exact and setup.state_dtype in (None, "float32"),
    )  # fmt: skip


class Screening:
    """Screens the flights of one kernel, first by a yardstick of few honest runs, the rest by all of them."""

    def __init__(self, info: KernelInfo, *, device: str, seed: int) -> None:
        self.info, self.device, self.seed = info, device, seed
        self._looked_at, self._passed_on = 0, 0

    def screen(self, answers: Sequence[Answer]) -> dict[int, Screened]:
        """Number -> what screening says. Answers that share no key are screened apart."""
        groups: dict[tuple[object, ...], list[Answer]] = {}
        for answer in answers:
            groups.setdefault(answer.key, []).append(answer)
        found: dict[int, Screened] = {}
        for group in groups.values():
            with threads_for(sum(a.case["v"].numel() for a in group)):
                found |= self._group(group)
        return found

    def _group(self, group: list[Answer]) -> dict[int, Screened]:
        if self._few_are_too_few:
            return _screen_group(group, self.info, self.device, self.seed, None)
        found = _screen_group(group, self.info, self.device, self.seed, FEW_RUNS)
        rest = [a for a in group if not found[a.number].plain]
        self._looked_at += len(group)
        self._passed_on += len(rest)
        if rest:
            # Their feedback stays that of the first look: it is the same whatever a case is judged beside.
            again = _screen_group(rest, self.info, self.device, self.seed, None)
            found |= {n: msgspec.structs.replace(found[n], plain=s.plain) for n, s in again.items()}
        return found

    @property
    def _few_are_too_few(self) -> bool:
        """Most cases had to be looked at twice."""
        return self._looked_at >= ENOUGH and self._passed_on > WASTED * self._looked_at


def _screen_group(
    group: list[Answer], info: KernelInfo, device: str, seed: int, most_runs: int | None
) -> dict[int, Screened]:
    setup = group[0].setup
    if setup.stochastic:
        return {a.number: Screened(plain=False) for a in group}
    whole = join(
        [a.case for a in group],
        [a.steps for a in group],
        chunk_sizes=(setup.chunk_size,),
        state_dtype=getattr(torch, setup.state_dtype or "float32"),
        device=device,
        seed=seed,
        most_runs=most_runs,
    )
    if not soundness_of(whole.witness).sound:
        return {a.number: Screened(plain=False) for a in group}
    trial = _trial(whole, group, info)
    exact = group[0].exact
    feedback = measured_feedback(trial, whole, with_ratio=not exact)
    if exact and (trial.clauses or not whole.witness.is_exact):
        return {a.number: Screened(plain=False, feedback=feedback[i]) for i, a in enumerate(group)}
    aside = {i for i, a in enumerate(group) if _fires_alone(a)}
    if exact and _is_equal(trial):
        return {a.number: Screened(plain=i not in aside, feedback=feedback[i]) for i, a in enumerate(group)}
    aside |= _tables_show(trial, whole)
    aside |= _until_silent(trial, whole, aside)
    return {a.number: Screened(plain=i not in aside, feedback=feedback[i]) for i, a in enumerate(group)}


def _trial(whole: Joined, group: list[Answer], info: KernelInfo) -> Trial:
    """The joined answers, as the sweep's judge would see them."""
    setup = group[0].setup
    capabilities = msgspec.structs.replace(info.capabilities, default_chunk_size=setup.chunk_size)
    if setup.options.get("l2norm") == "before":
        capabilities = msgspec.structs.replace(capabilities, l2norm="before")
    own = msgspec.structs.replace(info, capabilities=capabilities)
    output = torch.cat([a.output for a in group])
    state = torch.cat([a.state for a in group])
    return Trial(whole.witness, own, output, state)


def _is_equal(trial: Trial) -> bool:
    """Whether every value is the truth's: then no check has anything to say, and no yardstick is needed."""
    return all(
        float(m.rows.peak.sum()) == 0 and not m.masks.n_anywhere and not bool(m.masks.missing.any())
        for m in trial.measured.values()
    )


def _fires_alone(answer: Answer) -> bool:
    """Whether something besides the numbers (a slot of nobody, a guard band) was seen."""
    return any(o.status in ("fires", "suspect") for o in (*answer.ran.further, *guard_outcome(answer.ran)))


def _tables_show(trial: Trial, whole: Joined) -> set[int]:
    """Cases with a non-finite value, or a tile above a limit of tier 3."""
    found: set[int] = set()
    for name in TENSORS:
        measured = trial.measured.get(name)
        if measured is None:
            continue
        bad = (measured.masks.unexplained > 0).any(-1)
        found |= set(whole.rows_of(name)[bad].tolist())
        if trial.witness.inputs.g.ndim == 2 and not trial.witness.is_exact:
            scale = trial.yardstick.of(name)
            pools = ratios(measured, scale).bad.any(-1).nonzero().flatten()
            in_bad = torch.isin(scale.pools.pool_of_tile, pools)
            sequences = measured.tiles.sequence[in_bad]
            found |= set(whole.case_of_sequence[sequences].tolist())
    return found


def _until_silent(trial: Trial, whole: Joined, aside: set[int]) -> set[int]:
    """Set cases aside until no check fires on the rest; all of them where a check does not say which."""
    everything = set(range(whole.n_cases))
    for _ in range(whole.n_cases + 1):
        rest = _with_truth(trial, whole, aside) if aside else trial
        outcomes = [check(rest) for check in CASE_CHECKS]
        firing = [o for o in outcomes if o.status in ("fires", "suspect")]
        if not firing:
            return aside
        named = {c for o in firing if (c := _case_of(o.place, whole)) is not None}
        if not named - aside:
            return everything
        aside = aside | named
    return everything


def _case_of(place: Place | None, whole: Joined) -> int | None:
    if place is None or place.sequence is None:
        return None
    return int(whole.case_of_sequence[place.sequence])


def _with_truth(trial: Trial, whole: Joined, aside: set[int]) -> Trial:
    """The answers, those of some cases replaced by the truth rounded to the same dtype."""
    chosen = torch.zeros(whole.n_cases, dtype=torch.bool, device=trial.witness.device)
    chosen[list(aside)] = True
    output, state = trial.truth
    assert trial.state is not None
    of_row, of_sequence = chosen[whole.case_of_row], chosen[whole.case_of_sequence]
    return Trial(
        trial.witness,
        trial.info,
        torch.where(of_row.view(-1, 1, 1), output.to(trial.output.dtype), trial.output),
        torch.where(of_sequence.view(-1, 1, 1, 1), state.to(trial.state.dtype), trial.state),
    )
