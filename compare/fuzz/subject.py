"""The subject: one kernel under fuzz, with what its cases may be and how they are called.

The idea: from a number to a job and from a flight's answers to verdicts, without a thought for threads,
clocks or the store. `runner` has those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...capture.errors import BadInput
from ...kernels.interface import KernelInfo
from ..axes.axis import Ran, Setup, Situation
from ..axes.table import AXES
from ..sweep.attempt import Attempt
from ..sweep.baseline import baseline_for
from ..sweep.configuration import configuration_of, setup_of
from ..sweep.judging import Judge, Judgement, same_bits
from ..verdict import FAILING, Outcome, VerdictWord
from .build import build, is_exact
from .deviations import Axes
from .dice import Dice
from .flight import Job, Landed
from .generators.generator import CorpusEntry, Limits, Surroundings
from .generators.table import draw_recipe
from .naming import attempt_of
from .recipe import Recipe
from .screening import Screened, Screening, answer_of
from .stock import Stockroom, families_for

# One case in so many is run twice, and its bits compared.
REPEATED = 16
# Least heads and dims for a kernel that says nothing; the real layer's dims on a GPU.
CPU_SHAPES = ("1x2x32x32:bf16", "2x2x32x32:bf16")
CPU_SHAPES_64 = ("1x2x64x64:bf16",)
GPU_SHAPES = ("2x4x128x128:bf16", "4x4x128x128:bf16:beta=fp32")
CPU_TOKENS, GPU_TOKENS, INTERPRETED_TOKENS = 192, 512, 130
FIXED_DIMS = ("64 or 128",)


class Verdict(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What became of one job."""

    job: Job
    verdict: VerdictWord
    seconds: float
    feedback: dict[str, float] = {}
    attempt: Attempt | None = None
    """Of a failing or suspect one."""
    exercised: tuple[str, ...] = ()
    """Axes whose change was proved."""


def limits_for(
    info: KernelInfo, max_tokens: int | None, families: Sequence[str]
) -> tuple[Limits, dict[str, str]]:
    """What cases of this kernel may be; and family -> why it is left out."""
    contract, capabilities = info.contract, info.capabilities
    interpreted = bool(info.environment.get("interpreted"))
    on_gpu = str(info.environment.get("device", "cpu")).startswith("cuda")
    most = GPU_TOKENS if on_gpu else INTERPRETED_TOKENS if interpreted else CPU_TOKENS
    if interpreted and capabilities.max_tokens_cpu is not None:
        most = min(most, capabilities.max_tokens_cpu)
    wanted = families_for(contract.value)
    left = {f: why for f, why in wanted.items() if why and (not families or f in families)}
    drawn = tuple(f for f, why in wanted.items() if not why and (not families or f in families))
    if not drawn:
        reasons = "; ".join(f"{f}: {why}" for f, why in left.items()) or "no such family"
        raise BadInput(f"{info.name}: no family is left to draw from ({reasons})")
    return Limits(
        max_tokens=max_tokens or most,
        max_sequences=8 if capabilities.varlen else 1,
        empties=_empties(contract.value("lengths.empty")),
        families=drawn,
        chunk_size=capabilities.default_chunk_size or 64,
    ), left


def _empties(clause: Any) -> str:
    """Where empty sequences may stand, of a contract's `lengths.empty`."""
    if clause is None:
        return "anywhere"
    words = str(clause)
    return "end" if "at the end" in words or "before another" in words else "none"


def default_shapes(info: KernelInfo) -> tuple[str, ...]:
    """Heads, dims and dtypes that are compiled for: few."""
    if str(info.environment.get("device", "cpu")).startswith("cuda"):
        return GPU_SHAPES
    dims = str(info.contract.value("dims", ""))
    return CPU_SHAPES_64 if any(words in dims for words in FIXED_DIMS) else CPU_SHAPES


class Subject:
    """One kernel under fuzz."""

    def __init__(
        self,
        info: KernelInfo,
        *,
        seed: int,
        stock: Stockroom,
        limits: Limits,
        axes: Axes,
        given: Mapping[str, str],
        device: str,
    ) -> None:
        """given: the baseline asked for. device: of the verdict."""
        self.info, self.seed, self.stock, self.limits, self.axes = info, seed, stock, limits, axes
        self.given, self.device = dict(given), device
        self._screening = Screening(info, device=device, seed=seed)

    def job(self, number: int, corpus: Sequence[CorpusEntry]) -> Job:
        """Case `number`, given its lane's corpus."""
        dice = Dice(self.seed, number)
        around = Surroundings(
            stock=self.stock, limits=self.limits, corpus=corpus, deviations=self.axes.draw, number=number
        )
        recipe = draw_recipe(dice, around)
        return self.job_of(number, recipe, repeat=dice.chance(1 / REPEATED))

    def job_of(self, number: int, recipe: Recipe, *, repeat: bool = False) -> Job:
        """The job of a recipe; its deviations are cut to those that the case can take."""
        situation = self.situation(recipe)
        baseline, _ = baseline_for(self.given, situation)
        taken = self.axes.taken(recipe.deviations, situation, baseline)
        recipe = msgspec.structs.replace(recipe, deviations=taken)
        config = configuration_of(taken, baseline)
        return Job(
            number=number, recipe=recipe, setup=setup_of(config, situation), config=config, repeat=repeat
        )

    def situation(self, recipe: Recipe) -> Situation:
        return Situation(case=build(recipe, self.stock), info=self.info, seed=self.seed)

    def verdicts(self, landed: Landed) -> list[Verdict]:
        """Judge a flight: most of it at once, what is not plainly sound one by one."""
        answers = [
            answer_of(
                job.number,
                job.setup,
                ran,
                exact=is_exact(job.recipe),
                columns=self.info.capabilities.columns,
            )
            for job, ran in zip(landed.jobs, landed.first, strict=True)
            if ran.status == "ok"
        ]
        screened = self._screening.screen(answers)
        judge = Judge(self.device, self.seed)
        found = []
        for job, ran in zip(landed.jobs, landed.first, strict=True):
            known = screened.get(job.number, Screened(plain=False))
            found.append(self._verdict(job, ran, landed.second.get(job.number), known, judge))
        return found

    def _verdict(self, job: Job, ran: Ran, again: Ran | None, known: Screened, judge: Judge) -> Verdict:
        moved = _moved(self.info, job.setup, ran, again)
        exercised = tuple(
            n for n in job.recipe.deviations if ran.status == "ok" and AXES[n].exercised(job.setup, ran)
        )
        if known.plain and not moved:
            return Verdict(
                job=job, verdict="pass", seconds=ran.seconds, feedback=known.feedback, exercised=exercised
            )
        judgement = self._judged(job.setup, ran, again, moved, judge)
        word = judgement.ruling.verdict
        attempt = None
        if word in FAILING or word == "suspect":
            attempt = attempt_of(
                self.info, job.setup.case.label, job.config, job.recipe.deviations, job.setup, ran, judgement
            )
        return Verdict(
            job=job, verdict=word, seconds=ran.seconds, feedback=known.feedback, attempt=attempt,
            exercised=exercised,
        )  # fmt: skip

    def _judged(
        self, setup: Setup, ran: Ran, again: Ran | None, moved: list[Outcome], judge: Judge
    ) -> Judgement:
        """Of two runs, the one that failed to answer, else the first with what the second showed."""
        if again is not None and again.status != "ok" and ran.status == "ok":
            return judge.judge(setup, again, self.info)
        return judge.judge(setup, ran, self.info, moved)


def _moved(info: KernelInfo, setup: Setup, ran: Ran, again: Ran | None) -> list[Outcome]:
    """Whether a second run had other bits, or no answer, where the contract promises the same."""
    if again is None or ran.status != "ok":
        return []
    if again.status != "ok":
        return [Outcome(check="run-to-run", tier=4, status="fires", reason=again.message)]
    outcome = same_bits("run-to-run", info.contract.relation("run-to-run"), (setup, again), (setup, ran))
    return [outcome] if outcome.status == "fires" else []
