"""Lanes: a case must not depend on who runs it, in what order, or after how many interruptions."""

from __future__ import annotations

import random

import pytest
from gdncheck.compare.fuzz.feedback import FEATURES
from gdncheck.compare.fuzz.flight import Job
from gdncheck.compare.fuzz.journal import Journal, Row
from gdncheck.compare.fuzz.lanes import AHEAD, LANES, PER_WINDOW, Numbers, lanes_of
from gdncheck.compare.fuzz.recipe import Piece, Recipe
from gdncheck.compare.store import RunStore

SPAN = LANES * PER_WINDOW


@pytest.fixture
def journal(tmp_path):
    with RunStore.open(tmp_path / "run", parameters={}, resume=False) as store:
        yield Journal(store)


def recipe_of(number, corpus):
    """A recipe that tells what its case saw."""
    parent = corpus[number % len(corpus)].number if corpus else None
    return Recipe(shape=0, pieces=(Piece("qwen", 0, number, 1 + number % 70, "fresh"),), parent=parent)


def result_of(recipe):
    dice = random.Random(repr(recipe))
    return {name: dice.lognormvariate(0, 1.5) for name in FEATURES}


class Simulated:
    """A run whose kernel is a function of the recipe."""

    def __init__(self, journal, lanes=range(LANES), limit=4 * SPAN):
        self.journal, self.numbers, self.run = journal, Numbers(journal, 0, lanes, limit), {}

    def start(self, count):
        jobs = []
        for number in self.numbers.take(count):
            recipe = recipe_of(number, self.numbers.lane(number).snapshot(number))
            jobs.append(Job(number=number, recipe=recipe, setup=None, config={}))
        if jobs:
            self.journal.start(0, jobs)
        return jobs

    def land(self, job):
        found = result_of(job.recipe)
        self.journal.finish(0, job.number, "pass", feedback=found)
        self.numbers.finish(Row(number=job.number, verdict="pass", recipe=job.recipe, feedback=found))
        self.run[job.number] = job.recipe

    def all(self, count=8, order=None):
        """Run to the end, at most `count` in the air, landing in any order."""
        air = []
        while True:
            air += self.start(count)
            if not air:
                return self.run
            self.land(air.pop(order.randrange(len(air)) if order else 0))


def test_a_case_depends_on_the_order_in_which_others_land(journal, tmp_path):
    plain = Simulated(journal).all()
    assert sorted(plain) == list(range(4 * SPAN))
    with RunStore.open(tmp_path / "other", parameters={}, resume=False) as store:
        other = Simulated(Journal(store)).all(count=23, order=random.Random(3))
    assert other == plain
    assert any(recipe.parent is not None for recipe in plain.values())


def test_a_case_sees_a_corpus_that_is_not_settled_yet(journal):
    for number, recipe in Simulated(journal).all().items():
        if recipe.parent is not None:
            assert recipe.parent // SPAN <= number // SPAN - AHEAD
            assert recipe.parent % LANES == number % LANES


@pytest.mark.parametrize("shards", [2, 3, 5, LANES])
def test_shards_run_other_cases_than_one_process(journal, tmp_path, shards):
    plain = Simulated(journal).all()
    joined = {}
    for i in range(shards):
        with RunStore.open(tmp_path / f"shard{i}", parameters={}, resume=False) as store:
            own = Simulated(Journal(store), lanes_of((i + 1, shards))).all()
        assert not set(own) & set(joined)
        joined |= own
    assert joined == plain


def test_a_resumed_run_goes_on_otherwise(journal):
    """Stopped at random moments with cases in the air; those come first, one by one, then the rest."""
    dice = random.Random(11)
    done, again = {}, []
    for _ in range(12):
        run = Simulated(journal)
        assert not run.numbers.interrupted
        assert sorted(run.numbers.again) == sorted(again)
        alone = list(run.numbers.again)
        for number in alone:
            (job,) = run.start(8)
            assert job.number == number
            run.land(job)
        air = []
        for _ in range(dice.randrange(40)):
            air += run.start(dice.randrange(2, 9))
            if air:
                run.land(air.pop(dice.randrange(len(air))))
        assert not set(run.run) & set(done)
        done |= run.run
        again = [job.number for job in air]
    rest = Simulated(journal)
    done |= rest.all()
    assert sorted(done) == list(range(4 * SPAN))


def test_a_case_that_took_its_process_with_it_is_run_again(journal):
    run = Simulated(journal)
    (job,) = run.start(1)
    after = Simulated(journal)
    assert after.numbers.interrupted == [job.number]
    assert not after.numbers.again
    assert job.number not in after.all()
    assert journal.case(0, job.number).verdict == "interrupted"
    assert Simulated(journal).numbers.interrupted == []


def test_cases_that_ctrl_c_met_are_lost(journal):
    run = Simulated(journal)
    jobs = run.start(1)
    journal.forget(0, [job.number for job in jobs])
    after = Simulated(journal)
    assert not after.numbers.interrupted
    assert jobs[0].number in after.all()
