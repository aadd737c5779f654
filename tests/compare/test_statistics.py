"""Exact binomial answers against published tables, scipy, and what they promise in the long run."""

from __future__ import annotations

import math
import random

import pytest
from gdncheck.compare.statistics import (
    SequentialTest,
    anytime_interval,
    chance_of_clean,
    chance_of_seeing,
    clean_runs_needed,
    compare_rates,
    rate_interval,
    ruled_out,
)
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest

# Exact 95 % limits for k of n as textbooks tabulate them (Clopper and Pearson), to four digits.
PUBLISHED = [
    (0, 10, 0.0000, 0.3085),
    (1, 10, 0.0025, 0.4450),
    (2, 10, 0.0252, 0.5561),
    (5, 10, 0.1871, 0.8129),
    (10, 10, 0.6915, 1.0000),
    (5, 20, 0.0866, 0.4910),
    (0, 100, 0.0000, 0.0362),
    (1, 100, 0.0003, 0.0545),
    (10, 100, 0.0490, 0.1762),
    (50, 100, 0.3983, 0.6017),
]


@pytest.mark.parametrize(("failures", "runs", "low", "high"), PUBLISHED)
def test_two_sided_interval_departs_from_the_published_table(failures, runs, low, high):
    assert rate_interval(failures, runs) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 400), st.data())
def test_two_sided_interval_departs_from_scipys(runs, data):
    failures = data.draw(st.integers(0, runs))
    exact = binomtest(failures, runs).proportion_ci(0.95, method="exact")
    assert rate_interval(failures, runs) == pytest.approx((exact.low, exact.high), abs=1e-12)


@given(st.integers(2, 60), st.floats(0.01, 0.99))
def test_two_sided_interval_misses_the_rate_more_often_than_it_says(runs, rate):
    missed = [k for k in range(runs + 1) if not _within(rate, rate_interval(k, runs))]
    assert sum(binom.pmf(k, runs, rate) for k in missed) <= 0.05 + 1e-9


def _within(rate, interval):
    return interval[0] <= rate <= interval[1]


def test_one_sided_bound_is_taken_for_the_two_sided_one():
    # None of 30: one-sided 9.5 %, two-sided 11.6 %.
    assert ruled_out(30) == pytest.approx(0.0950, abs=5e-5)
    assert rate_interval(0, 30)[1] == pytest.approx(0.1157, abs=5e-5)
    assert ruled_out(30) == pytest.approx(1 - 0.05 ** (1 / 30))
    assert rate_interval(0, 30)[1] == pytest.approx(1 - 0.025 ** (1 / 30))


def test_clean_runs_that_rule_out_a_rate_are_miscounted():
    assert clean_runs_needed(1e-3) == 2995
    assert clean_runs_needed(1e-4) == 29956
    assert clean_runs_needed(0.5) == 5  # 0.5^4 = 0.0625, 0.5^5 = 0.031
    assert clean_runs_needed(0.95) == 1


@given(st.floats(1e-4, 0.9), st.sampled_from([0.9, 0.95, 0.99]))
def test_clean_runs_needed_is_not_the_least_number(rate, confidence):
    needed = clean_runs_needed(rate, confidence)
    assert ruled_out(needed, confidence) <= rate * (1 + 1e-7)
    assert needed == 1 or ruled_out(needed - 1, confidence) > rate * (1 - 1e-7)


def test_thirty_clean_runs_are_said_to_clear_one_failure_in_nine():
    assert chance_of_clean(1 / 9, 30) == pytest.approx(0.0292, abs=5e-5)
    assert chance_of_seeing(1 / 9, 30) == pytest.approx(0.9708, abs=5e-5)
    assert (chance_of_clean(0, 30), chance_of_clean(1, 30), chance_of_clean(1, 0)) == (1, 0, 1)


def test_fishers_test_departs_from_the_tea_tasting_lady():
    # Fisher 1935: three of four cups right on each side.
    assert compare_rates(3, 4, 1, 4, "greater").p_value == pytest.approx(0.2429, abs=5e-5)
    assert compare_rates(3, 4, 1, 4).p_value == pytest.approx(0.4857, abs=5e-5)
    assert compare_rates(4, 4, 0, 4).p_value == pytest.approx(2 / 70)


def test_fishers_test_of_a_configuration_with_itself_finds_a_difference():
    assert compare_rates(3, 30, 3, 30).p_value == pytest.approx(1.0)
    assert compare_rates(0, 30, 0, 30).p_value == pytest.approx(1.0)
    found = compare_rates(5, 45, 0, 400)
    assert found.p_value < 1e-4
    assert (found.rate_a, found.rate_b) == (5 / 45, 0)


@pytest.mark.parametrize(("rate", "clean"), [(1 / 9, 98), (0.02, 571)])
def test_rejecting_a_flaky_failure_takes_another_number_of_clean_runs(rate, clean):
    wald = SequentialTest.for_rate(rate)
    assert (wald.p1, wald.p0) == (rate / 2, min(0.01, rate / 10))
    assert wald.clean_runs_to_reject == clean
    assert math.ceil(wald.expected_runs(0)) == clean
    for _ in range(clean - 1):
        assert wald.add(False) == "go on"
    assert wald.add(False) == "lost"


@pytest.mark.parametrize("rate", [1 / 9, 0.05])
def test_sequential_test_errs_more_often_than_it_says(rate):
    made = random.Random(5)

    def decided(true_rate):
        wald = SequentialTest.for_rate(rate, alpha=0.05, beta=0.05)
        while (word := wald.add(made.random() < true_rate)) == "go on":
            pass
        return word, wald.runs

    probe = SequentialTest.for_rate(rate, alpha=0.05, beta=0.05)
    for true_rate, wrong in ((probe.p0, "keeps"), (probe.p1, "lost")):
        series = [decided(true_rate) for _ in range(300)]
        # 5 % and four standard deviations of 300 draws.
        assert sum(word == wrong for word, _ in series) / 300 <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 300)
        mean = sum(runs for _, runs in series) / 300
        assert mean == pytest.approx(probe.expected_runs(true_rate), rel=0.45)


@given(st.integers(0, 300), st.data())
def test_anytime_interval_is_narrower_than_the_fixed_one_or_misses_the_share(runs, data):
    failures = data.draw(st.integers(0, runs))
    low, high = anytime_interval(failures, runs)
    fixed = rate_interval(failures, runs) if runs else (0.0, 1.0)
    assert 0 <= low <= fixed[0] + 1e-9
    assert fixed[1] - 1e-9 <= high <= 1


def test_peeking_after_every_run_breaks_the_anytime_interval():
    made, missed, missed_fixed = random.Random(11), 0, 0
    for _ in range(150):
        failures, out, out_fixed = 0, False, False
        for runs in range(1, 301):
            failures += made.random() < 0.1
            if runs % 5 == 0:
                out |= not _within(0.1, anytime_interval(failures, runs))
                out_fixed |= not _within(0.1, rate_interval(failures, runs))
        missed, missed_fixed = missed + out, missed_fixed + out_fixed
    assert missed / 150 <= 0.05
    assert missed_fixed > missed  # which is why the fixed one must not be peeked at


@pytest.mark.parametrize(
    "call",
    [
        lambda: rate_interval(4, 3),
        lambda: rate_interval(-1, 3),
        lambda: ruled_out(-1),
        lambda: clean_runs_needed(0),
        lambda: chance_of_clean(1.5, 3),
        lambda: SequentialTest(0.5, 0.1),
        lambda: anytime_interval(2, 1),
        lambda: rate_interval(1, 3, confidence=1),
    ],
)
def test_impossible_counts_give_an_answer(call):
    with pytest.raises(ValueError, match="must"):
        call()
