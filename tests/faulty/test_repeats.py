"""A failure that comes and goes is found by reruns, with its rate; a steady kernel has one answer."""

from __future__ import annotations

import pytest
from faulty_memory import sometimes
from faulty_run import Bench, case_of
from gdncheck.capture.errors import BadInput
from gdncheck.compare.repeats import repeat
from scipy.stats import binomtest

RUNS = 160


@pytest.fixture(scope="module")
def bench():
    with Bench() as opened:
        yield opened


def failures_of(rate, runs):
    """What the fault's own dice say."""

    class Call:
        memory: dict = {}  # noqa: RUF012

    import torch

    output = torch.zeros(201, 4, 1)
    edit, count = sometimes(rate), 0
    for _ in range(runs):
        count += bool(torch.isnan(edit(output.clone(), Call)).any())
    return count


def test_a_kernel_that_fails_in_one_run_of_twenty_is_cleared(bench):
    report = repeat(case_of("packed"), bench.runner("one_call_in_twenty_is_nan", "repeat"), runs=RUNS)
    assert report.runs == RUNS
    assert report.failures == failures_of(0.05, RUNS) > 0
    assert report.rate == report.failures / RUNS
    exact = binomtest(report.failures, RUNS).proportion_ci(0.95, method="exact")
    assert report.interval == pytest.approx((exact.low, exact.high), rel=1e-9)
    assert report.interval[0] < 0.05 < report.interval[1]
    assert report.distinct_outputs == 2
    (failing,) = report.failing
    place = failing.ruling.first_nonfinite
    assert (failing.ruling.tier, place.tensor, place.class_) == (1, "output", "nan")
    assert (place.sequence, place.head, place.token) == (3, 2, 64)
    assert failing.runs == report.failures
    assert report.ruled_out is None


def test_a_steady_kernel_has_more_than_one_answer(bench):
    report = repeat(case_of("packed"), bench.runner("chunk", "steady"), runs=40)
    assert (report.failures, report.distinct_outputs) == (0, 1)
    assert report.interval[0] == 0
    assert report.interval[1] == pytest.approx(1 - 0.025 ** (1 / 40))
    assert report.ruled_out == pytest.approx(1 - 0.05 ** (1 / 40))
    assert {(n.rate, n.runs) for n in report.runs_needed} == {(1e-3, 2995), (1e-4, 29956)}


def test_answers_that_move_within_rounding_are_called_one(bench):
    report = repeat(case_of("packed"), bench.runner("one_entry_moves_from_call_to_call", "moves"), runs=6)
    assert (report.failures, report.distinct_outputs) == (0, 2)


def test_the_first_failing_run_is_not_told(bench):
    report = repeat(case_of("packed"), bench.runner("third_call_is_wrong", "third"), runs=20)
    assert report.failures == 1
    assert report.failing[0].first == 2


def test_no_run_at_all_is_a_traceback(bench):
    with pytest.raises(BadInput, match="runs is 0"):
        repeat(case_of("packed"), bench.runner("chunk", "none"), runs=0)
