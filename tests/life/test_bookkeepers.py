"""Bookkeepers: sound ones are silent, every planted fault is found, shrunk and explained by the ledger."""

from __future__ import annotations

import msgspec
import pytest
from gdncheck.compare.life.bookkeeping import Bookkeeper
from gdncheck.compare.life.draw import draw_history
from gdncheck.compare.life.life import life
from gdncheck.compare.life.planted import PLANTED
from gdncheck.compare.life.shrink import shrink
from gdncheck.compare.life.steps import Arrive, Call, Finish, History, Prefill


@pytest.mark.parametrize("style", ["sound", "sound-clears"])
@pytest.mark.parametrize(("slots", "draft"), [(18, 3), (9, 1), (30, 5)])
def test_the_ledger_accuses_a_sound_bookkeeper(style, slots, draft, told):
    run = told(draw_history(4, 0, 200, slots=slots, draft=draft), style, judged=False)
    assert run.failure is None
    assert run.steps == 200


@pytest.mark.parametrize("style", ["sound", "sound-clears"])
def test_a_sequences_own_truth_accuses_a_sound_bookkeeper(style, told):
    run = told(draw_history(4, 0, 90), style)
    assert run.failure is None
    assert 0 < run.worst_ratio < 0.5


# What the ledger says of each, at least.
WORDS = {
    "stale-one-token": ("read", "(fresh, 1 token) read slot"),
    "conv-in-place": ("read", "the conv state of slot"),
    "accepted-off-by-one": ("position", "a rejected guess"),
    "neighbours-checkpoint": ("read", "last written at step"),
    "padded-row-writes": ("unowned", "a padded row wrote"),
    "position-skipped": ("position", "was fed from token"),
    "not-cleared": ("read", "(fresh,"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_not_found_within_200_steps_or_not_explained(name, told):
    history = draw_history(4, 0)
    run = told(history, f"planted:{name}", judged=False)
    assert run.failure is not None
    assert run.steps <= 200
    rule, words = WORDS[name]

    def fails(part):
        failure = told(part, f"planted:{name}", judged=False).failure
        return failure is not None and failure.rule == run.failure.rule

    short = shrink(history, fails, last=run.failure.step)
    assert len(short.steps) <= 6
    again = told(short, f"planted:{name}").failure
    assert again.rule == rule
    assert words in again.line
    assert again.line.startswith(f"step {len(short.steps)}: ")
    # The numbers see it too: it is a fault, not a matter of taste.
    assert again.found
    assert told(short, "sound").failure is None
    assert told(short, "sound-clears").failure is None


def test_what_is_left_can_be_cut_further(told):
    """Taking any one step away makes the failure go."""
    history = draw_history(4, 0)

    def fails(part):
        failure = told(part, "planted:not-cleared", judged=False).failure
        return failure is not None and failure.rule == "read"

    short = shrink(history, fails)
    for i in range(len(short.steps)):
        assert not fails(short.with_steps(short.steps[:i] + short.steps[i + 1 :]))


def stale(tokens):
    first = Call(rows=(Prefill(sequence=0, tokens=3),))
    second = Call(rows=(Prefill(sequence=1, tokens=tokens),))
    steps = (Arrive(sequences=(0,)), first, Finish(sequence=0), Arrive(sequences=(1,)), second)
    return History(steps=steps)


def test_the_line_does_not_say_who_left_the_state_behind(told):
    failure = told(stale(1), "planted:stale-one-token").failure
    assert failure.line == (
        "step 5: sequence 1 (fresh, 1 token) read slot 1, last written at step 2 by sequence 0 (position 3), "
        "which finished at step 3"
    )
    assert told(stale(2), "planted:stale-one-token").failure is None


class Short(Bookkeeper):
    """Leaves a row out."""

    def plan(self, request):
        plan = super().plan(request)
        return msgspec.structs.replace(plan, rows=plan.rows[1:])


class Outside(Bookkeeper):
    def plan(self, request):
        plan = super().plan(request)
        rows = tuple(msgspec.structs.replace(r, read=99) for r in plan.rows)
        return msgspec.structs.replace(plan, rows=rows)


class Twice(Bookkeeper):
    """Two rows in one slot."""

    def row(self, asked, clears):
        plan = super().row(asked, clears)
        return msgspec.structs.replace(plan, writes=(1,) * len(plan.writes))


class Raises(Bookkeeper):
    def resume(self, sequence, source):
        raise KeyError("no such block\nat all")


class Nothing(Bookkeeper):
    def plan(self, request):
        return None


@pytest.mark.parametrize(
    ("made", "words", "status"),
    [
        (Short, "were asked for", "fail"),
        (Outside, "slot 99 is not in a pool of 30", "fail"),
        (Twice, "two rows of one call write slot 1", "fail"),
        (Raises, "the bookkeeper raised KeyError in resume", "error"),
        (Nothing, "returned NoneType, not a Plan", "fail"),
    ],
)
def test_a_broken_bookkeeper_breaks_the_run(made, words, status, told):
    failure = told(draw_history(4, 0), made, judged=False).failure
    assert words in failure.line
    assert "\n" not in failure.line
    assert (failure.rule, failure.status) == ("plan", status)


def test_the_report_of_a_bookkeeper_lacks_the_shortest_history():
    report = life(bookkeeper="planted:accepted-off-by-one", seed=2, steps=40)
    (result,) = report.results
    assert (report.verdict, report.exit_status) == ("fail", 1)
    assert result.found_at is not None
    assert len(result.history.steps) <= 6
    assert result.failure.rule == "position"
    assert result.drawn.number == 0


@pytest.mark.slow
@pytest.mark.parametrize("style", ["sound", "sound-clears"])
def test_a_sound_bookkeeper_is_accused_within_1000_steps(style):
    report = life(bookkeeper=style, seed=12, steps=1000)
    assert (report.verdict, report.results[0].steps) == ("pass", 1000)
