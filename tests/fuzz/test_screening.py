"""Screening: many answers judged at once must not hide what each would show alone, nor accuse a sound one."""

from __future__ import annotations

import pytest
import torch
from gdncheck.compare.axes.axis import Situation
from gdncheck.compare.fuzz.build import build
from gdncheck.compare.fuzz.deviations import Axes
from gdncheck.compare.fuzz.feedback import FEATURES
from gdncheck.compare.fuzz.flight import fly
from gdncheck.compare.fuzz.generators.generator import Limits
from gdncheck.compare.fuzz.recipe import Piece, Recipe
from gdncheck.compare.fuzz.screening import Screening, answer_of
from gdncheck.compare.fuzz.stock import Stockroom, shape_of
from gdncheck.compare.fuzz.subject import Subject
from gdncheck.compare.sweep.judging import Judge

SHAPE = shape_of("1x2x16x16:bf16")
FAMILIES = ("qwen", "parallel-keys", "mixed-decay", "no-decay", "tiny-decay", "exact", "gaussian")


@pytest.fixture
def subject_of(handle_of):
    """subject_of(kernel) -> (handle, subject)."""

    def make(name):
        handle = handle_of(name)
        limits = Limits(max_tokens=130, families=FAMILIES)
        stock = Stockroom(5, [SHAPE], 130)
        subject = Subject(
            handle.info, seed=5, stock=stock, limits=limits, axes=Axes({}), given={}, device="cpu"
        )
        return handle, subject

    return make


@pytest.fixture
def landed_of(subject_of):
    """landed_of(kernel, jobs of a subject) -> (subject, what its flight brought back)."""

    def make(name, jobs_of):
        handle, subject = subject_of(name)
        return subject, fly(handle, jobs_of(subject), handle.info, 60.0)

    return make


def numbered(count, first=0):
    return lambda subject: [subject.job(first + n, ()) for n in range(count)]


def lengths(*cases, family="qwen", deviations=None):
    """Jobs with these lengths each."""

    def jobs(subject):
        made = []
        for i, sizes in enumerate(cases):
            pieces = tuple(Piece(family, 0, 7 * i + j, n, "random") for j, n in enumerate(sizes))
            recipe = Recipe(shape=0, pieces=pieces, deviations=deviations or {})
            made.append(subject.job_of(i, recipe))
        return made

    return jobs


@pytest.mark.parametrize("first", [0, 7 * 64])
def test_a_sound_kernel_is_accused_beside_others(landed_of, first):
    subject, landed = landed_of("emulation.chunk", numbered(24, first))
    verdicts = subject.verdicts(landed)
    assert [v.verdict for v in verdicts] == ["pass"] * 24
    assert all(set(v.feedback) == set(FEATURES) for v in verdicts)


def spoilt(landed, number, row, factor):
    """The flight with one row of one head of one answer multiplied."""
    ran = landed.first[number]
    ran.output[row, 1] *= factor
    return landed


@pytest.mark.parametrize(("sizes", "row"), [((1,), 0), ((65,), 64), ((3, 1, 40), 3), ((2, 64), 65)])
@pytest.mark.parametrize("family", ["qwen", "no-decay", "mixed-decay"])
def test_a_fault_in_one_case_is_lost_among_thirty_with_small_tiles(landed_of, sizes, row, family):
    """One token of 30 packed cases: pooled with the other cases' small tiles it would drown."""
    cases = [sizes, *[(1,), (65,), (2, 1)] * 8]
    subject, landed = landed_of("emulation.chunk", lengths(*cases, family=family))
    verdicts = subject.verdicts(spoilt(landed, 0, row, 1.5))
    assert verdicts[0].verdict == "fail"
    assert {v.verdict for v in verdicts[1:]} == {"pass"}


@pytest.mark.parametrize("split", ["at-63", "at-64n+1", "at-1"])
def test_a_cut_case_is_judged_as_if_it_were_whole(landed_of, split):
    cases = [(65,), (130,), (70, 9)]
    changed = {"split": split, "state_dtype": "bfloat16"}
    subject, landed = landed_of("emulation.chunk", lengths(*cases, deviations=changed))
    assert all(job.recipe.deviations for job in landed.jobs)
    assert {v.verdict for v in subject.verdicts(landed)} == {"pass"}
    faulty = subject.verdicts(spoilt(landed, 1, 100, 1.5))
    assert [v.verdict for v in faulty] == ["pass", "fail", "pass"]
    assert faulty[1].attempt.place.token == 100


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nonfinite_state_is_lost_in_the_joined_case(landed_of, value):
    subject, landed = landed_of("emulation.chunk", lengths((5,), (40, 2), (66,)))
    landed.first[1].state[1, 0, 2, 3] = value
    verdicts = subject.verdicts(landed)
    assert [v.verdict for v in verdicts] == ["pass", "fail", "pass"]
    place = verdicts[1].attempt.place
    assert (place.tensor, place.sequence, place.head) == ("state", 1, 0)


def test_a_wrong_integer_of_an_exact_case_is_within_a_tolerance(landed_of):
    subject, landed = landed_of("emulation.chunk", lengths((40,), (65, 2), family="exact"))
    assert {v.verdict for v in subject.verdicts(landed)} == {"pass"}
    verdicts = subject.verdicts(spoilt(landed, 1, 20, 2.0))
    assert [v.verdict for v in verdicts] == ["pass", "fail"]
    assert verdicts[1].attempt.tier == 0


@pytest.mark.slow
def test_the_screen_says_less_than_the_judge(landed_of):
    """Whatever screening calls plainly sound, the sweep's judge passes; over random small spoilings."""
    subject, landed = landed_of("emulation.chunk", numbered(14, 64))
    dice = torch.Generator().manual_seed(1)
    for ran in landed.first:
        if torch.rand((), generator=dice) < 0.6 and ran.output.shape[0]:
            row = int(torch.randint(0, ran.output.shape[0], (), generator=dice))
            # From below the noise to far above it.
            ran.output[row, 0] *= 1 + 10.0 ** float(torch.rand((), generator=dice) * 4 - 4)
    answers = [
        answer_of(job.number, job.setup, ran, exact=False, columns=False)
        for job, ran in zip(landed.jobs, landed.first, strict=True)
    ]
    screened = Screening(subject.info, device="cpu", seed=5).screen(answers)
    judge = Judge("cpu", 5)
    alone = {
        job.number: judge.judge(job.setup, ran, subject.info).ruling.verdict
        for job, ran in zip(landed.jobs, landed.first, strict=True)
    }
    plain = {n for n, s in screened.items() if s.plain}
    assert all(alone[n] == "pass" for n in plain)
    assert {n for n, verdict in alone.items() if verdict == "fail"} == set(screened) - plain


def test_feedback_depends_on_what_a_case_is_judged_beside(landed_of):
    subject, landed = landed_of("emulation.chunk", numbered(12, 128))
    together = {v.job.number: v.feedback for v in subject.verdicts(landed)}
    for job, ran in zip(landed.jobs, landed.first, strict=True):
        alone = type(landed)(jobs=[job], first=[ran], second={}, wall=0.0, kernel=0.0)
        (verdict,) = subject.verdicts(alone)
        for name in FEATURES:
            assert verdict.feedback[name] == pytest.approx(together[job.number][name], rel=1e-3, abs=1e-9), (
                name
            )


def test_a_case_is_called_as_it_was_drawn(subject_of):
    """The job of a number keeps only deviations that its case can take, and says so in its recipe."""
    _, subject = subject_of("emulation.chunk")
    for number in range(40):
        job = subject.job(number, ())
        situation = Situation(case=build(job.recipe, subject.stock), info=subject.info, seed=5)
        for name, value in job.recipe.deviations.items():
            assert job.config[name] == value
        assert job.setup.case.n_sequences >= situation.case.n_sequences
