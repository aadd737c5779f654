"""The selftest finds every planted fault; a blind, misplaced or false finding fails it."""

from __future__ import annotations

import json

import msgspec
import pytest
from gdncheck.compare.selftest import PLANTED, Found, Planted, Selftest, SelftestReport, selftest
from gdncheck.compare.selftest_report import document, dumps, last_line
from gdncheck.kernels.planted import FAULTS
from gdncheck.kernels.pool import WorkerPool

QUICK = ("values-swapped", "one-nan", "state-rounded", "wrong-chunk-32", "row-not-written", "bits-move")


@pytest.fixture(scope="module")
def test():
    with WorkerPool(device="cpu", time_limit=120) as pool:
        yield Selftest(pool, "cpu", 0)


def planted(fault):
    return next(one for one in PLANTED if one.fault == fault)


def test_a_fault_is_planted_that_nobody_looks_for():
    looked_for = {one.fault for one in PLANTED}
    assert set(FAULTS) <= looked_for
    assert looked_for - set(FAULTS) == {"bad-input", "bad-configuration"}
    families = {one.family for one in PLANTED}
    assert {f"tier {n}" for n in range(5)} <= {family.partition(":")[0] for family in families}


@pytest.mark.parametrize("fault", QUICK)
def test_a_planted_fault_is_not_found(test, fault):
    line = test.line(planted(fault))
    assert (line.found, line.twin_sound, line.ok) == (True, True, True), line.why


def test_a_check_that_finds_something_else_satisfies_the_selftest(test):
    line = test.line(msgspec.structs.replace(planted("one-nan"), says=("low-bits",)))
    assert (line.found, line.ok) == (False, False)
    assert "not as planted" in line.why


def test_a_fault_named_at_another_place_satisfies_the_selftest(test, monkeypatch):
    monkeypatch.setattr("gdncheck.compare.selftest.TOKEN", 64)
    line = test.line(planted("one-nan"))
    assert not line.ok


def test_a_blind_check_satisfies_the_selftest(test):
    blind = Planted(fault="wrong-fp16", family="tier 3: ratio", by="diff", says=("emulation-ratio",))
    line = test.line(blind)  # the case is bf16, so nothing is wrong with it
    assert not line.ok
    assert SelftestReport(lines=(line,), device="cpu").exit_status == 1


def test_a_blamed_twin_satisfies_the_selftest(test, monkeypatch):
    monkeypatch.setattr(test, "_twins", {("diff", "", "qwen"): Found(blamed=True, reason="a false alarm")})
    line = test.line(planted("one-nan"))
    assert (line.found, line.twin_sound, line.ok) == (True, False, False)
    assert "a false alarm" in line.why


@pytest.mark.slow
def test_the_whole_selftest_misses_something_on_this_machine():
    report = selftest(device="cpu", command="gdncheck selftest")
    assert [line.fault for line in report.lines if not line.ok] == []
    told = json.loads(dumps(report))
    assert told == document(report)
    assert (told["schema"], told["verdict"], told["found"]) == (1, "pass", len(PLANTED))
    assert "planted faults found on cpu" in last_line(report)
    assert report.exit_status == 0


@pytest.mark.gpu
def test_the_whole_selftest_misses_something_on_the_gpu():
    report = selftest(device="cuda")
    assert [line.why for line in report.lines if not line.ok] == []
    assert report.device.startswith("cuda")
