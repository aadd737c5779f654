"""Tolerances: they decide only where they are named, the verdict says so, a failing check tells its own."""

from __future__ import annotations

import pytest
from gdncheck.capture.errors import BadInput
from gdncheck.compare.diff import report_of
from gdncheck.compare.jsonout import document
from gdncheck.compare.report import verdict_word, would_pass
from gdncheck.compare.session import Settings
from gdncheck.compare.tolerances import Tolerance, parse, tolerances


@pytest.mark.parametrize(
    ("atol", "rtol", "wanted"),
    [
        (None, None, {}),
        (1e-3, None, {"output": Tolerance(atol=1e-3), "state": Tolerance(atol=1e-3)}),
        (None, {"state": 1e-2}, {"state": Tolerance(rtol=1e-2)}),
        ({"output": 1e-3}, 1e-2, {"output": Tolerance(atol=1e-3, rtol=1e-2), "state": Tolerance(rtol=1e-2)}),
        (0.0, None, {"output": Tolerance(), "state": Tolerance()}),
    ],
)
def test_a_tolerance_lands_on_the_wrong_tensor(atol, rtol, wanted):
    assert tolerances(atol, rtol) == wanted


@pytest.mark.parametrize("atol", [-1.0, float("nan"), float("inf"), {"outputs": 1.0}, {"state": -1.0}])
def test_a_tolerance_that_is_none_is_taken(atol):
    with pytest.raises(BadInput, match="atol"):
        tolerances(atol, None)


def test_words_of_the_command_line_are_misread():
    assert parse("atol", ()) is None
    assert parse("atol", ("1e-3",)) == {"output": 1e-3, "state": 1e-3}
    assert parse("atol", ("1e-3", "state=1e-5")) == {"output": 1e-3, "state": 1e-5}
    assert parse("rtol", ("output=0.5",)) == {"output": 0.5}
    for word in ("abc", "output=", "=1", "output=x"):
        with pytest.raises(BadInput, match="output=1e-3"):
            parse("atol", (word,))


@pytest.fixture(scope="module")
def off_by(honest, as_rule):
    """A sound kernel whose output and state are too large by a factor."""

    def build(output_factor, state_factor):
        def rule(*tensors, **options):
            output, state = honest.chunk(*tensors, **options)
            return output * output_factor, state * state_factor

        return as_rule(rule)

    return build


def judged(verdict_on, kernel, case, atol=None, rtol=None):
    return verdict_on(kernel, case, relations="none", tolerances=tolerances(atol, rtol))


def test_a_tolerance_for_one_tensor_replaces_the_rules_for_the_other(off_by, case_of, verdict_on):
    case = case_of(lengths=[70])
    assert judged(verdict_on, off_by(1.1, 1), case).verdict == "fail"
    loose = judged(verdict_on, off_by(1.1, 1), case, {"output": 10.0})
    assert (loose.verdict, loose.ruling.rule, loose.ruling.by_tolerance) == ("pass", "tolerance", ("output",))
    state = judged(verdict_on, off_by(1.1, 1.1), case, {"output": 10.0})
    assert (state.verdict, state.ruling.rule) == (
        "fail",
        "running-bound",
    ) or state.ruling.rule == "emulation-ratio"
    assert state.ruling.worst_tile.tensor == "state"
    both = judged(verdict_on, off_by(1.1, 1.1), case, 10.0)
    assert (both.verdict, both.ruling.by_tolerance) == ("pass", ("output", "state"))


def test_the_tolerance_that_would_have_passed_does_not_pass(off_by, case_of, verdict_on):
    case = case_of(lengths=[70])
    strict = judged(verdict_on, off_by(1.0, 1.2), case, 1e-6)
    assert (strict.verdict, strict.ruling.rule) == ("fail", "tolerance")
    atol = 0.0
    for _ in range(2):  # output first, then the state
        found = next(o for o in strict.ruling.outcomes if o.check == "tolerance")
        atol = found.numbers["would_pass"]["atol"] if found.status == "fires" else atol
        strict = judged(verdict_on, off_by(1.0, 1.2), case, atol)
    assert strict.verdict == "pass"
    assert judged(verdict_on, off_by(1.0, 1.2), case, atol * 0.99).verdict == "fail"
    assert judged(verdict_on, off_by(1.0, 1.2), case, None, 10.0).verdict == "pass"


def test_a_tolerance_excuses_a_nan(honest, case_of, verdict_on, as_rule):
    def spoiled(*tensors, **options):
        output, state = honest.chunk(*tensors, **options)
        output[3, 0, 0] = float("nan")
        return output, state

    result = judged(verdict_on, as_rule(spoiled), case_of(lengths=[70]), 1e9)
    assert (result.verdict, result.ruling.rule) == ("fail", "non-finite")


def test_a_verdict_by_tolerance_is_unmarked(off_by, case_of, verdict_on):
    case = case_of(lengths=[70])
    by_choice = judged(verdict_on, off_by(1.1, 1), case, {"output": 10.0})
    settings = Settings(tolerances=tolerances({"output": 10.0}, None))
    report = report_of(
        [by_choice], [], all_layers=False, strict=False, settings=settings, seconds=0.0, command=""
    )
    assert verdict_word(by_choice, report) == "pass (by tolerance)"
    plain = document(report)
    assert plain["results"][0]["by_tolerance"] == ["output"]
    assert plain["tolerance"] == {"output": {"atol": 10.0, "rtol": 0.0}}
    by_rule = judged(verdict_on, off_by(1, 1), case)
    plain_report = report_of(
        [by_rule], [], all_layers=False, strict=False, settings=Settings(), seconds=0.0, command=""
    )
    assert verdict_word(by_rule, plain_report) == "pass"
    assert document(plain_report)["tolerance"] is None


FAULTS = {
    "scaled": lambda o, s: (o * 1.1, s),
    "huge": lambda o, s: (o * 1e4, s * 1e4),
    "state rounded": lambda o, s: (o, s.bfloat16().float()),
    "nan": lambda o, s: (o.index_fill(0, o.new_zeros(1).long(), float("nan")), s),
    "wrong shape": lambda o, s: (o, s[:, :, :3]),
}


@pytest.mark.parametrize("family", ["qwen", "exact"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_check_keeps_its_tolerance_to_itself(fault, family, honest, case_of, verdict_on, as_rule):
    rule = as_rule(lambda *t, **o: FAULTS[fault](*honest.chunk(*t, **o)))
    result = verdict_on(rule, case_of(family, lengths=[70, 30]), relations="quick")
    if result.verdict == "pass":  # the exact state needs no more than bf16
        assert (fault, family) == ("state rounded", "exact")
        return
    line = would_pass(result)
    fired = [o for o in result.ruling.outcomes if o.status == "fires"]
    assert fired
    for outcome in fired:
        assert outcome.check in line
        if outcome.numbers.get("would_pass") is None:
            assert outcome.check in ("non-finite", "low-bits", "shape")
