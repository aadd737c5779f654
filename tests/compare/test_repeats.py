"""Repeats: what counts as a failure, which relation moving bits break, JSON, exit statuses; autotune pins."""

from __future__ import annotations

import json
import random

import msgspec
import pytest
import torch
from gdncheck.capture.errors import BadInput
from gdncheck.capture.make import make
from gdncheck.compare.autotune_sweep import pins_from
from gdncheck.compare.repeat_report import document, dumps, last_line, write_report
from gdncheck.compare.repeats import repeat
from gdncheck.kernels.contract import Clause
from gdncheck.kernels.interface import RunResult

SEQUENCE, HEAD, ROW, TOKEN = 2, 1, 70 + 1 + 65, 65


@pytest.fixture(scope="module")
def case():
    return make("qwen", lengths=[70, 1, 66], k_heads=1, v_heads=2, dims=(32, 32), state="random")


class Flaky:
    """A sound kernel whose call number n is edited by `edit(n, output, state)`; n is None for none."""

    def __init__(self, inner, edit):
        self.inner, self.edit, self.calls = inner, edit, 0

    @property
    def info(self):
        return self.inner.info

    def run(self, calls):
        results = []
        for call in calls:
            result = self.inner.run([call])[0]
            edited = self.edit(self.calls, *(t.clone() for t in result.outputs.values()))
            self.calls += 1
            if isinstance(edited, RunResult):
                results.append(edited)
                continue
            outputs = dict(zip(result.outputs, edited or result.outputs.values(), strict=True))
            results.append(msgspec.structs.replace(result, outputs=outputs))
        return results


@pytest.fixture
def flaky(honest, in_process):
    def build(edit, capabilities=None):
        declared = {"profile": "generic", **(capabilities or {})}
        return Flaky(in_process(honest.chunk, declared), edit)

    return build


def spoiled(number_fails, factor=1.5):
    """Wrong at one row where `number_fails(n)`."""

    def edit(number, output, state):
        if number_fails(number):
            output[ROW, HEAD] *= factor
        return output, state

    return edit


def moved(number_moves):
    """One entry by an ulp where `number_moves(n)`."""

    def edit(number, output, state):
        if number_moves(number):
            output[ROW, HEAD, 0] *= 1 + 2.0**-7
        return output, state

    return edit


def test_a_steady_kernel_fails_or_has_several_outputs(flaky, case):
    report = repeat(case, flaky(spoiled(lambda n: False)), runs=30)
    assert (report.verdict, report.exit_status) == ("pass", 0)
    assert (report.runs, report.failures, report.rate, report.distinct_outputs) == (30, 0, 0.0, 1)
    assert "one-sided" in report.worst.reason
    assert report.still_needed.runs == 2995 - 30


@pytest.mark.parametrize("seed", range(3))
def test_failures_are_counted_wrongly_or_at_another_place(flaky, case, seed):
    draw = random.Random(seed)
    failing = {n for n in range(24) if draw.random() < 0.25} | {5}
    report = repeat(case, flaky(spoiled(failing.__contains__)), runs=24, processes=1)
    assert (report.verdict, report.exit_status) == ("fail", 1)
    assert (report.failures, report.distinct_outputs) == (len(failing), 2)
    assert report.rate == len(failing) / 24
    place = report.worst.place
    assert (place.tensor, place.sequence, place.head, place.token) == ("output", SEQUENCE, HEAD, TOKEN)
    assert report.failing[0].first == min(failing)
    assert "two-sided" in report.worst.reason


def test_each_distinct_output_is_judged_more_than_once(flaky, case, monkeypatch):
    from gdncheck.compare import repeats

    judged = []
    original = repeats.judge
    monkeypatch.setattr(repeats, "judge", lambda *a, **k: judged.append(1) or original(*a, **k))
    repeat(case, flaky(spoiled(lambda n: n % 3 == 1)), runs=40)
    assert len(judged) == 2


def test_bits_that_move_within_rounding_pass_where_run_to_run_is_promised(flaky, case):
    report = repeat(case, flaky(moved(lambda n: n % 2)), runs=8)
    assert (report.verdict, report.worst.rule, report.worst.tier) == ("fail", "run-to-run", 4)
    assert (report.failures, report.distinct_outputs) == (0, 2)
    place = report.worst.place
    assert (place.class_, place.sequence, place.head, place.token) == ("moves", SEQUENCE, HEAD, TOKEN)


def test_bits_that_move_fail_although_the_contract_says_so(flaky, case):
    clause = Clause(
        id="relation.run-to-run",
        kind="relation",
        applies_to="run-to-run",
        value="not promised",
        source="test",
    )
    report = repeat(case, flaky(moved(lambda n: n % 2), {"clauses": (clause,)}), runs=8)
    assert (report.verdict, report.distinct_outputs) == ("pass", 2)
    assert "run-to-run (not promised)" in report.worst.reason


def test_a_first_call_that_moves_within_rounding_fails_or_goes_unsaid(flaky, case):
    report = repeat(case, flaky(moved(lambda n: n == 0)), runs=8)
    assert report.verdict == "pass"  # first against warm is observed, not promised
    assert "first-vs-warm" in report.worst.reason
    assert "run-to-run" not in report.worst.reason


def test_a_crash_is_no_failure_or_counts_as_an_output(flaky, case):
    def edit(number, output, state):
        if number == 3:
            return RunResult(status="crash", message="killed by SIGSEGV")
        return output, state

    report = repeat(case, flaky(edit), runs=10)
    assert (report.verdict, report.failures, report.distinct_outputs) == ("error", 1, 1)
    assert "SIGSEGV" in report.worst.reason
    # The call after it is the first one of a new process.
    assert [run.cold for run in report.worst.all_runs] == [n in (0, 4) for n in range(10)]


def test_a_kernel_that_refuses_is_asked_again_or_passes(flaky, case):
    def edit(number, output, state):
        return RunResult(status="refused", message="K must be 128")

    runner = flaky(edit)
    report = repeat(case, runner, runs=10)
    assert (report.verdict, report.exit_status) == ("skipped", 3)
    assert runner.calls == 1


def test_a_bad_input_is_blamed_on_the_kernel(flaky, case):
    k = case["k"].clone()
    k[100] = torch.nan
    report = repeat(case.with_tensors(k=k), flaky(spoiled(lambda n: False)), runs=4)
    assert (report.verdict, report.failures, report.exit_status) == ("out-of-contract", 0, 1)


def test_documented_keys_are_missing_or_not_json(flaky, case, tmp_path):
    report = repeat(case, flaky(spoiled(lambda n: n == 2, float("nan"))), runs=9, command="gdncheck repeat x")
    told = json.loads(dumps(report))
    assert told == document(report)
    assert told["schema"] == 1
    assert (told["runs"], told["failures"], told["distinct_outputs"]) == (9, 1, 2)
    assert told["rate"] == 1 / 9
    assert told["interval"] == pytest.approx([0.0028, 0.4825], abs=5e-5)
    assert told["confidence"] == 0.95
    assert told["runs_needed"] == {"rate": 1 / 9, "runs": 26}  # (8/9)^26 = 4.7 %
    (series,) = told["results"]
    assert sorted(output["runs"] for output in series["outputs"]) == [1, 8]
    assert series["place"]["class"] == "nan"
    assert "fail" in last_line(report)
    assert "gdncheck repeat x" in last_line(report)
    write_report(report, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == told
    assert "1 of 9 runs fail" in (tmp_path / "out" / "report.txt").read_text()


@pytest.mark.parametrize(
    ("argument", "what"),
    [({"runs": 0}, "runs is 0"), ({"processes": 0}, "processes is 0"), ({"rule_out": 1.0}, "rule out"),
     ({"tune": "soon"}, "tune is 'soon'")],
)  # fmt: skip
def test_an_impossible_argument_runs(flaky, case, argument, what):
    with pytest.raises(BadInput, match=what):
        repeat(case, flaky(spoiled(lambda n: False)), **argument)


def test_pins_are_read_as_something_else():
    found = pins_from(["kkt:BK=64+num_warps=4", "kkt:num_stages=3", "out:BV=32"])
    assert found == {"kkt": {"BK": 64, "num_warps": 4, "num_stages": 3}, "out": {"BV": 32}}
    with pytest.raises(BadInput, match="KERNEL:NAME=NUMBER"):
        pins_from(["BK=64"])
