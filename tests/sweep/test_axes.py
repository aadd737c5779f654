"""Axes in one process: what each changes, what it refuses, and that a change not made is no proof."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch
from gdncheck.capture.errors import BadInput
from gdncheck.compare.axes import autotune, packing, rank, recase, rounding, schedule
from gdncheck.compare.axes.axis import Ran, Situation
from gdncheck.compare.axes.table import AXES, value_of
from gdncheck.compare.sweep.configuration import configuration_of, setup_of
from gdncheck.compare.sweep.engine import run_setup
from gdncheck.compare.sweep.judging import Judge
from gdncheck.kernels.contract import Capabilities, Contract
from gdncheck.kernels.interface import KernelInfo, RunResult
from gdncheck.reference.truth import truth
from hypothesis import given, settings
from hypothesis import strategies as st

WORDS = st.one_of(
    st.sampled_from(["none", "random", "at-64n", "at-64n+1", "at-64n-1", "at-1", "at-T-1"]),
    st.integers(1, 90).map("every-{}".format),
    st.integers(1, 90).map("at-{}".format),
    st.integers(1, 33).map("at-{}n".format),
)


@settings(max_examples=150, deadline=None)
@given(lengths=st.lists(st.integers(0, 200), min_size=1, max_size=4), word=WORDS, seed=st.integers(0, 5))
def test_a_schedule_loses_or_repeats_a_token(lengths, word, seed):
    steps = schedule.steps_of(lengths, word, seed=seed)
    for i, length in enumerate(lengths):
        pieces = [(a, b) for step in steps for s, a, b in step if s == i]
        assert pieces[0][0] == 0
        assert pieces[-1][1] == length
        assert all(b == a for (_, b), (a, _) in itertools.pairwise(pieces))
        assert length == 0 or all(a < b for a, b in pieces)
    if word.startswith("every-"):
        assert all(sum(b - a for _, a, b in step) <= int(word[6:]) for step in steps)


@pytest.mark.parametrize("word", ["at-0", "every-0", "at-64n+", "64", "at--3", "cut", "at-T"])
def test_a_word_that_is_no_schedule_is_taken(word):
    assert not schedule.is_schedule(word)


class Sound:
    """Runs calls in this process; keeps them. An engine's adapter gathers, this one does what it is given."""

    def __init__(self, *, in_place=False, zeroes=True):
        self.calls, self.in_place, self.zeroes = [], in_place, zeroes

    def run(self, calls):
        return [self._one(call) for call in calls]

    def _one(self, call):
        self.calls.append(call)
        t = call.tensors
        state = t.get("initial_state")
        if "pool" in t:
            at = t["slot_indices"].clamp(min=0)
            kept = (t["slot_indices"] >= 0) & (t["has_initial_state"] if self.zeroes else True)
            state = torch.where(kept.view(-1, 1, 1, 1), t["pool"][at], 0)
        output, final = truth(
            t["q"], t["k"], t["v"], t["g"], t["beta"], scale=call.options.scale, initial_state=state,
            cu_seqlens=t["cu_seqlens"], l2norm=call.options.qk == "raw",
        )  # fmt: skip
        outputs = {"output": output.to(t["v"].dtype), "final_state": final.float()}
        if self.in_place:
            pool = t["pool"].clone()
            owned = t["slot_indices"] >= 0
            pool[t["slot_indices"][owned]] = final[owned].to(pool.dtype)
            outputs = {"output": outputs["output"], "pool": pool}
        return RunResult(status="ok", outputs=outputs, seconds=0.0)


INFO = KernelInfo(
    name="sound",
    capabilities=Capabilities(
        chunk_sizes=(16, 32, 64), state_dtypes=("float32", "bfloat16"), l2norm="both", profile="generic",
        pins=("toy:BK=32",),
    ),
    contract=Contract(kernel="sound"),
)  # fmt: skip


@pytest.fixture
def applied(small_case):
    """applied({axis: value}, case options) -> (setup, situation)."""

    def build(deviations, **options):
        situation = Situation(case=small_case(**options), info=INFO)
        baseline = {name: axis.baseline(situation) for name, axis in AXES.items()}
        return setup_of(configuration_of(deviations, baseline), situation), situation

    return build


POOLED = [
    {"split": "at-3"},
    {"split": "every-2", "state_dtype": "bfloat16"},
    {"state": "stale-nan"},
    {"state": "nan-pool", "split": "at-4"},
    {"state": "padding"},
    {"state": "slot-order", "packing": "before"},
    {"packing": "poisoned", "split": "at-3"},
    {"state_dtype": "bfloat16"},
]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("deviations", POOLED, ids=str)
def test_the_simulated_pool_makes_a_sound_kernel_wrong(deviations, in_place, applied):
    setup, _ = applied(deviations, lengths=[9, 0, 6])
    if in_place and setup.judged == "own" and not setup.through_pool:
        pytest.skip("no pool")
    ran = run_setup(Sound(in_place=in_place), setup, INFO)
    judged = Judge("cpu", 0).judge(setup, ran, INFO)
    assert judged.ruling.verdict == "pass", judged.ruling.reason


def test_a_fresh_sequence_that_reads_its_slot_passes(applied):
    setup, _ = applied({"state": "stale"})
    ran = run_setup(Sound(zeroes=False), setup, INFO)
    judged = Judge("cpu", 0).judge(setup, ran, INFO)
    assert judged.ruling.verdict == "fail"


def test_a_write_into_the_slot_of_nobody_passes(applied):
    class Careless(Sound):
        def _one(self, call):
            result = super()._one(call)
            owned = set(call.tensors["slot_indices"].tolist())
            result.outputs["pool"][next(i for i in range(9) if i not in owned)] = 1.0
            return result

    setup, _ = applied({"state": "nan-pool"})
    ran = run_setup(Careless(in_place=True), setup, INFO)
    judged = Judge("cpu", 0).judge(setup, ran, INFO)
    assert (judged.ruling.verdict, judged.ruling.rule) == ("fail", "unowned-slots")


def test_a_state_that_is_not_handed_on_passes(applied):
    class Forgetful(Sound):
        def _one(self, call):
            pool = torch.zeros_like(call.tensors["pool"])
            return super()._one(msgspec.structs.replace(call, tensors={**call.tensors, "pool": pool}))

    setup, _ = applied({"split": "at-3"})
    judged = Judge("cpu", 0).judge(setup, run_setup(Forgetful(), setup, INFO), INFO)
    assert judged.ruling.verdict == "fail"


def test_a_pool_of_bfloat16_is_blamed_on_the_kernel_or_hides_coarser_rounding(applied):
    setup, _ = applied({"split": "every-2", "state_dtype": "bfloat16"}, lengths=[40])
    judge, sound = Judge("cpu", 0), Sound()
    assert judge.judge(setup, run_setup(sound, setup, INFO), INFO).ruling.verdict == "pass"

    class Coarse(Sound):
        def _one(self, call):
            result = super()._one(call)
            state = result.outputs["final_state"]
            step = torch.exp2(state.abs().clamp(min=1e-30).log2().floor() - 3)
            result.outputs["final_state"] = (state / step).round() * step
            return result

    assert judge.judge(setup, run_setup(Coarse(), setup, INFO), INFO).ruling.verdict == "fail"


EVIDENCE_BASED = {
    "memory": "nan", "autotune": "toy:BK=32", "rounding": "bf16", "split": "at-3", "state_dtype": "bfloat16",
    "state": "nan-pool",
}  # fmt: skip


@pytest.mark.parametrize("name", EVIDENCE_BASED)
def test_a_change_that_left_no_trace_counts_as_exercised(name, applied):
    setup, _ = applied({name: EVIDENCE_BASED[name]})
    assert AXES[name].exercised(setup, Ran(status="ok")) == ""


@pytest.mark.parametrize(
    ("name", "value", "options"),
    [
        ("chunk_size", "128", {}),
        ("split", "at-64n", {}),
        ("packing", "permuted", {}),
        ("state", "none", {"state": "none"}),
        ("input_dtype", "bf16", {}),
        ("rounding", "bf16", {}),
        ("l2norm", "before-rounded", {}),
        ("heads", "tp2", {}),
        ("autotune", "other:BK=1", {}),
        ("repeat", "busy", {}),
    ],
)
def test_a_value_that_cannot_be_taken_is_tried(name, value, options, applied):
    _, situation = applied({}, **options)
    info = msgspec.structs.replace(INFO, capabilities=msgspec.structs.replace(INFO.capabilities, pins=()))
    reason = AXES[name].refuses(msgspec.structs.replace(situation, info=info), value)
    assert reason


def test_an_axis_refuses_its_own_baseline(applied):
    _, situation = applied({})
    for name, axis in AXES.items():
        value = axis.baseline(situation)
        assert axis.refuses(situation, value) == ""
        assert value_of(name, value, "here") == value


@pytest.mark.parametrize("name", AXES)
def test_a_word_that_is_no_value_of_an_axis_is_taken(name):
    with pytest.raises(BadInput, match=f"no value of {name}"):
        value_of(name, "§", "--axis")


def test_heads_of_the_ranks_are_not_the_whole(small_case):
    case = small_case(k_heads=2, v_heads=8)
    parts = [rank.heads_of_rank(case, 2, number) for number in range(2)]
    for tensor in ("q", "k", "v", "g", "beta", "initial_state"):
        assert torch.equal(torch.cat([p[tensor] for p in parts], dim=1), case[tensor])


def test_packed_sequences_are_not_taken_out_as_they_went_in(small_case):
    case = small_case(lengths=[4, 0, 7, 1])
    each = [recase.sequences_of(case, [i]) for i in range(4)]
    whole = recase.joined(each)
    for tensor in ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state"):
        assert torch.equal(whole[tensor], case[tensor])
    assert recase.shortened(case, 3).lengths == [3, 0, 3, 1]


@pytest.mark.parametrize("value", packing.VALUES)
def test_own_sequences_are_lost_among_the_neighbours(value, applied):
    setup, situation = applied({"packing": value}, lengths=[5, 3])
    own = recase.sequences_of(setup.case, list(setup.own))
    assert torch.equal(own["v"], situation.case["v"])
    assert torch.equal(own["initial_state"], situation.case["initial_state"])


def test_a_pin_does_not_survive_its_spelling():
    pin = {"BK": 64, "num_warps": 4, "FLAG": True}
    assert autotune.pins_of(autotune.word_of("kernel", pin)) == {"kernel": pin}


def test_pins_of_an_interpreted_kernel_differ_in_warps_only(applied):
    _, situation = applied({})
    tuner = [{"BK": 32, "num_warps": 2}, {"BK": 32, "num_warps": 4}, {"BK": 64, "num_warps": 2}]
    evidence = {"tuners": [{"kernel": "kkt", "configurations": tuner}]}
    capabilities = msgspec.structs.replace(INFO.capabilities, pins=())
    info = msgspec.structs.replace(INFO, capabilities=capabilities, environment={"interpreted": True})
    inside = msgspec.structs.replace(situation, info=info, evidence=evidence)
    assert AXES["autotune"].values(inside) == ["tuner", "kkt:BK=32", "kkt:BK=64"]
    outside = msgspec.structs.replace(info, environment={"device": "cuda"})
    assert len(AXES["autotune"].values(msgspec.structs.replace(inside, info=outside))) == 6


def test_cast_points_do_not_survive_their_spelling():
    casts = {"w": "bf16", "u": "fp16"}
    assert rounding.casts_of(rounding.word_for(casts)) == casts


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "deviations", [{}, {"split": "at-3"}, {"heads": "tp2"}, {"packing": "before"}], ids=str
)
def test_a_case_with_a_pool_is_called_without_its_states(deviations, in_place, small_case):
    given = small_case(lengths=[7, 4], k_heads=2, v_heads=4, dims=(16, 8))
    pool = torch.full((5, 4, 16, 8), torch.nan)
    slots = torch.tensor([3, 1])
    pool[slots] = given["initial_state"]
    case = given.with_tensors(initial_state=None, pool=pool, slot_indices=slots)
    case = case.with_tensors(has_initial_state=torch.tensor([True, True]))
    situation = Situation(case=case, info=INFO)
    baseline = {name: axis.baseline(situation) for name, axis in AXES.items()}
    setup = setup_of(configuration_of(deviations, baseline), situation)
    gathered = not setup.through_pool and deviations
    sound = Sound(in_place=in_place and not gathered)
    judged = Judge("cpu", 0).judge(setup, run_setup(sound, setup, INFO), INFO)
    assert judged.ruling.verdict == "pass", judged.ruling.reason
    assert any(
        bool(t.any())
        for call in sound.calls
        for n, t in call.tensors.items()
        if n in ("pool", "initial_state")
    )


def test_witnesses_of_large_cases_fill_the_memory(small_case, monkeypatch):
    from gdncheck.compare.sweep import judging

    monkeypatch.setattr(judging, "KEPT_ENTRIES", 7 * 2 * 16 * 4)
    judge = judging.Judge("cpu", 0)
    cases = [small_case(seed=seed) for seed in range(8)]
    for case in [*cases, *cases]:
        assert judge.soundness(case).sound
    assert len(judge._known) == 4
