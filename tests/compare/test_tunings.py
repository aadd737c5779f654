"""Fresh tunings counted by length; what a tuner's key leaves out; pins that do not compile told apart."""

from __future__ import annotations

import json
from io import StringIO

import msgspec
import pytest
from gdncheck.capture.errors import BadInput
from gdncheck.capture.make import make
from gdncheck.compare.axes.table import AXES
from gdncheck.compare.repeat_report import dumps, print_report
from gdncheck.compare.repeats import repeat
from gdncheck.compare.sweep.attempt import Attempt
from gdncheck.compare.sweep.jsonout import document
from gdncheck.compare.sweep.plan import choice_of
from gdncheck.compare.sweep.report import lines_of
from gdncheck.compare.sweep.sweep import KernelSweep, SweepReport
from gdncheck.compare.sweep.tuning import wish_of
from gdncheck.compare.tunings import Tuner, TuningAccount, in_lines, tuning_account
from gdncheck.kernels.contract import Contract
from gdncheck.kernels.interface import KernelInfo, RunResult
from gdncheck.reference.truth import truth
from rich.console import Console

KKT = Tuner(
    kernel="kkt", configurations=({"BK": 32}, {"BK": 64}), key=("H", "BT"), left_out=("T",), kept_on_disk=True
)
ON_GPU = KernelInfo(name="k", contract=Contract(kernel="k"), environment={"device": "cuda"})


class Runner:
    """A kernel whose tuner picks BK=64 below 20 tokens, and by turns above; `lost` lengths fail."""

    def __init__(self, info=ON_GPU, lost=()):
        self.info, self.lost, self.seen = info, lost, []

    def run(self, calls):
        (call,) = calls
        tokens = call.tensors["v"].shape[0]
        self.seen.append((tokens, call.options.tune))
        if tokens in self.lost:
            return [RunResult(status="error", message="no memory")]
        pick = "BK=64" if tokens < 20 or len(self.seen) % 2 else "BK=32"
        return [RunResult(status="ok", evidence={"launched": {"kkt": pick, "other": "X=1"}})]


@pytest.fixture(scope="module")
def case():
    return make("qwen", lengths=[40, 7], k_heads=1, v_heads=2, dims=(16, 16))


def account(runner, case, n=4, tuned_at=(16, 32, 64), **options):
    return tuning_account(runner, case, [KKT], n, tuned_at, say=lambda *words: None, **options)


def test_fresh_tunings_are_counted_at_other_lengths_or_without_tuning(case):
    runner = Runner()
    found = account(runner, case)
    assert runner.seen == [(16, "fresh"), (32, "fresh"), (47, "fresh")] * 4
    assert [(t.tokens, t.n, sum(t.picks["kkt"].values())) for t in found.tunings] == [
        (16, 4, 4), (32, 4, 4), (47, 4, 4),
    ]  # fmt: skip
    assert found.tunings[0].picks == {"kkt": {"BK=64": 4}}
    assert found.tunings[1].picks == {"kkt": {"BK=32": 2, "BK=64": 2}}
    assert found.not_covered == ()


def test_tunings_that_failed_or_came_too_late_are_counted(case):
    found = account(Runner(lost=(32,)), case)
    assert [t.n for t in found.tunings] == [4, 0, 4]
    assert found.not_covered == ("fresh tunings at 32 tokens: 0 of 4 (no memory)",)
    clock = iter([False] * 4 + [True] * 100)
    found = account(Runner(), case, late=lambda: next(clock))
    assert [t.n for t in found.tunings] == [2, 1, 1]
    assert "fresh tunings at 47 tokens: 1 of 4 (the time is used up)" in found.not_covered


def test_fresh_tunings_are_claimed_without_a_gpu_or_a_tuner(case):
    on_cpu = msgspec.structs.replace(ON_GPU, environment={"device": "cpu"})
    runner = Runner(on_cpu)
    found = account(runner, case)
    assert (found.tunings, runner.seen) == ((), [])
    assert "there is none" in found.not_covered[0]
    found = tuning_account(Runner(), case, [], 4, say=lambda *words: None)
    assert found.not_covered == ("fresh tunings: the call launches no tuned kernel",)


def test_a_report_does_not_say_what_the_key_leaves_out(case):
    lines = list(in_lines(account(Runner(), case)))
    assert lines[0] == (
        "kkt: 2 configurations, a choice is remembered by H, BT, every tensor's dtype, not by T; "
        "the choice is kept on disk"
    )
    assert lines[1] == "  drawn at 16 tokens: 4 of 4 BK=64"
    assert "other" not in "".join(lines)


def attempt(verdict, pin, **evidence):
    config = {"autotune": pin}
    return Attempt(
        kernel="k",
        case="c",
        config=config,
        deviations=config,
        verdict=verdict,
        reason="why",
        evidence=evidence,
    )


def test_a_pin_that_does_not_compile_is_mixed_with_wrong_results():
    failures = {"kkt": "BK=32: OutOfResources: shared memory"}
    sweep = KernelSweep(
        kernel="k", case="c", tokens=47, baseline={**dict.fromkeys(AXES, "as ever"), "autotune": "tuner"},
        attempts=(
            attempt("pass", "kkt:BK=64"), attempt("skipped", "kkt:BK=32", compile_failures=failures),
            # The tuner's first choice did not fit and the next one ran: no pin is to blame.
            attempt("pass", "tune-never", compile_failures=failures),
        ),
        tuning=TuningAccount(kernel="k", case="c", tuners=(KKT,)),
    )  # fmt: skip
    text = [line.plain for line in lines_of(sweep)]
    (line,) = [t for t in text if t.startswith("does not compile")]
    assert "autotune=kkt:BK=32" in line
    assert "OutOfResources" in line
    assert not any("not covered" in t for t in text)
    assert any("not by T" in t for t in text)
    (kernel,) = document(SweepReport(verdict="pass", sweeps=(sweep,)))["kernels"]
    assert [f["deviations"] for f in kernel["compile_failures"]] == [{"autotune": "kkt:BK=32"}]
    assert kernel["tuning"]["tuners"][0]["left_out"] == ["T"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"tunings": -1}, "tunings is -1"),
        ({"tuned_at": [0]}, "tuned at 0 tokens"),
        ({"pin_runs": 0}, "pin_runs is 0"),
        ({"tunings": 3, "only": ["split"]}, "leaves out"),
    ],
)
def test_a_wrong_number_is_taken(words, message):
    choice = choice_of({}, words.get("only", ()), ())
    with pytest.raises(BadInput, match=message):
        wish_of(choice, words.get("pin_runs"), words.get("tunings", 0), words.get("tuned_at", (16,)))
    if "pin_runs" not in words and "only" not in words:
        with pytest.raises(BadInput, match=message):
            repeat("none.safetensors", **words)


class Sound(Runner):
    """The truth, rounded, whose first call tells of a tuner."""

    def run(self, calls):
        results = []
        for call in calls:
            given = {name: call.tensors[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens")}
            output, state = truth(**given, initial_state=call.tensors.get("initial_state"))
            evidence = {"launched": {"kkt": "BK=64"}}
            if not self.seen:
                evidence["tuners"] = [msgspec.to_builtins(KKT) | {"pruned": False, "seconds_over_best": {}}]
            self.seen.append(call.options.tune)
            outputs = {"output": output.to(call.tensors["v"].dtype), "final_state": state.float()}
            results.append(RunResult(status="ok", outputs=outputs, seconds=0.1, evidence=evidence))
        return results


def test_repeats_leave_the_tuners_out(case):
    runner = Sound()
    report = repeat(case, runner, runs=3, tunings=2, tuned_at=[16], device="cpu")
    assert runner.seen == ["stock"] * 3 + ["fresh"] * 4
    (found,) = json.loads(dumps(report))["tuning"]
    assert found["tuners"][0]["left_out"] == ["T"]
    assert [(t["tokens"], t["picks"]) for t in found["tunings"]] == [
        (16, {"kkt": {"BK=64": 2}}), (47, {"kkt": {"BK=64": 2}}),
    ]  # fmt: skip
    text = Console(file=StringIO(), width=200)
    print_report(report, text)
    assert "drawn at 16 tokens: 2 of 2 BK=64" in text.file.getvalue()
    assert repeat(case, Sound(), runs=1, device="cpu").tuning[0].tunings == ()
