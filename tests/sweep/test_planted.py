"""Planted faults: the sweep names the planted configuration, its neighbour and its place, and no other."""

from __future__ import annotations

import pytest
from gdncheck.compare.sweep.jsonout import document

SEQ, HEAD, CHUNK, TOKEN = "sequence", "head", "chunk", "token"


def at(tensor, kind, sequence=0, head=1, chunk=0, token=5):
    return {"tensor": tensor, "class": kind, SEQ: sequence, HEAD: head, CHUNK: chunk, TOKEN: token}


# name -> (case, options, first_..., deviations, what the passing neighbour changes, place, fewest tokens)
PLANTED = {
    "chunk_64_and_64n_plus_1": (
        {"lengths": [129]}, {"only": ["chunk_size"]}, "wrong",
        {}, {"chunk_size": "16"}, at("output", "wrong", chunk=2, token=128), 129,
    ),
    "state_bf16": (
        {}, {"only": ["state_dtype"]}, "nonfinite",
        {"state_dtype": "bfloat16"}, {"state_dtype": "float32"},
        at("state", "nan", chunk=None, token=None), 1,
    ),
    "split_at_64n_plus_1": (
        {"lengths": [130], "state": "none"},
        {"axes": {"split": ["at-64n", "at-64n+1", "at-64n-1", "at-1"]}, "only": ["split"]}, "wrong",
        {"split": "at-64n+1"}, {"split": "none"}, at("output", "wrong", chunk=1, token=70), 130,
    ),
    "neighbour_poisoned": (
        {}, {"axes": {"packing": ["behind", "poisoned"]}, "only": ["packing"]}, "nonfinite",
        {"packing": "poisoned"}, {"packing": "alone"}, at("output", "nan", sequence=1), 6,
    ),
    "slot_stale": (
        {}, {"axes": {"state": ["none", "stale"]}, "only": ["state"]}, "wrong",
        {"state": "stale"}, {"state": "captured"}, at("output", "wrong"), 6,
    ),
    "memory_nan": (
        {}, {"only": ["memory"]}, "nonfinite",
        {"memory": "nan"}, {"memory": "clean"}, at("output", "nan"), 6,
    ),
    "beta_and_g_bf16": (
        {"beta_dtype": "fp32"}, {"only": ["beta_dtype", "g_dtype"], "depth": "2"}, "wrong",
        {"beta_dtype": "bf16", "g_dtype": "bf16"}, {"beta_dtype": "captured"}, at("output", "wrong"), 6,
    ),
    "third_repeat": (
        {}, {"axes": {"repeat": ["2", "5"]}, "only": ["repeat"]}, "wrong",
        {"repeat": "5"}, {"repeat": "1"}, at("output", "wrong"), 6,
    ),
    "first_call": (
        {}, {"axes": {"repeat": ["2", "first"]}, "only": ["repeat"]}, "wrong",
        {"repeat": "first"}, {"repeat": "1"}, at("output", "wrong"), 6,
    ),
    "pin_of_64": (
        {}, {"only": ["autotune"]}, "wrong",
        {"autotune": "toy_kernel:BK=64"}, {"autotune": "tuner"}, at("output", "wrong"), 6,
    ),
    "four_heads": (
        {"k_heads": 2, "v_heads": 8}, {"only": ["heads"]}, "wrong",
        {"heads": "tp2"}, {"heads": "all"}, at("output", "wrong"), 6,
    ),
    "one_token_among_long": (
        {}, {"axes": {"packing": ["behind", "one-token"]}, "only": ["packing"]}, "wrong",
        {"packing": "one-token"}, {"packing": "alone"}, at("output", "wrong", token=0), 2,
    ),
}  # fmt: skip
# Axes that the twelve do not touch.
FURTHER = {
    "input_fp16": (
        {}, {"only": ["input_dtype"]}, "wrong",
        {"input_dtype": "fp16"}, {"input_dtype": "captured"}, at("output", "wrong"), 6,
    ),
    "l2norm_before": (
        {"qk": "raw"}, {"axes": {"l2norm": ["before-rounded"]}, "only": ["l2norm"]}, "wrong",
        {"l2norm": "before-rounded"}, {"l2norm": "in-kernel"}, at("output", "wrong"), 6,
    ),
    "goes_on_from_a_guess": (
        {}, {"only": ["life"]}, "wrong", {"life": "verify-0"}, {"life": "prefill"},
        at("output", "wrong", token=4), 2,
    ),
    "writes_outside": (
        {}, {"only": ["memory"]}, "wrong", {"memory": "guard"}, {"memory": "clean"},
        at("output", "wrong", sequence=None, head=None, chunk=None, token=None), 1,
    ),
}  # fmt: skip


def check(report, expected):
    _, _, kind, deviations, change, place, tokens = expected
    plain = document(report)
    first = plain[f"first_{kind}"]
    assert first is not None, [(a["deviations"], a["verdict"], a["reason"]) for a in plain["results"]]
    assert first["deviations"] == deviations
    assert first["config"] == {**plain["baseline"], **deviations}
    assert first["confirmed"]
    assert first["nearest_passing"]["change"] == change
    assert first["place"] == place
    assert first["smallest_tokens"] == tokens
    assert plain["verdict"] == "fail"
    assert report.exit_status == 1


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_configuration_is_not_what_the_sweep_names(name, sweep_of):
    expected = PLANTED[name]
    case, options, *_ = expected
    check(sweep_of(name, case, **options), expected)


@pytest.mark.parametrize("name", FURTHER)
def test_an_axis_is_blind(name, sweep_of):
    expected = FURTHER[name]
    case, options, *_ = expected
    check(sweep_of(name, case, **options), expected)


def test_a_pin_whose_bits_move_passes_because_it_ran_once(sweep_of):
    once = sweep_of("racing_pin", only=["autotune"], pin_runs=1)
    assert once.verdict == "pass"
    report = sweep_of("racing_pin", only=["autotune"], pin_runs=4)
    plain = document(report)
    assert plain["first_wrong"]["deviations"] == {"autotune": "toy_kernel:BK=64"}
    assert plain["first_wrong"]["rule"] == "run-to-run"
    assert plain["first_wrong"]["nearest_passing"]["change"] == {"autotune": "tuner"}
    assert "of 4" in plain["first_wrong"]["reason"]
    (sound,) = [a for a in plain["results"] if a["deviations"] == {"autotune": "toy_kernel:BK=32"}]
    assert sound["verdict"] == "pass"
    assert sound["exercised"]["autotune"].endswith("4 times")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in PLANTED if n != "beta_and_g_bf16"])
def test_another_axis_is_named_where_all_are_swept_by_processes(name, processes):
    expected = PLANTED[name]
    check(processes(name, expected[0]), expected)


FEW = {
    "split": ["at-3", "every-4", "random"],
    "packing": ["before", "one-token", "permuted", "poisoned"],
    "state": ["random", "stale-nan", "nan-pool", "slot-order", "padding"],
    "memory": ["nan", "guard"],
    "repeat": ["3", "first"],
}


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ({"lengths": [9, 5]}, {"axes": FEW}),
        pytest.param({"lengths": [70, 9]}, {}, marks=pytest.mark.slow),
        pytest.param(
            {"lengths": [130], "state": "none", "qk": "raw"}, {"depth": "2"}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_sound_kernel_fails_somewhere(case, options, sweep_of):
    report = sweep_of("sound", case, **options)
    bad = [(a.deviations, a.verdict, a.reason) for a in report.sweeps[0].attempts if a.failed]
    assert bad == []
    assert (report.verdict, report.exit_status) == ("pass", 0)
    swept = {n for a in report.sweeps[0].attempts if a.verdict == "pass" for n in a.deviations}
    axes = {"chunk_size", "split", "packing", "state", "state_dtype", "input_dtype", "memory", "repeat"}
    assert swept >= axes
    for attempt in report.sweeps[0].attempts:
        assert attempt.verdict != "pass" or set(attempt.exercised) == set(attempt.deviations)


def test_a_failure_that_owes_to_the_calls_before_is_blamed_on_a_configuration(sweep_of):
    report = sweep_of("third_of_any", only=["state_dtype", "memory"])
    (finding,) = report.sweeps[0].findings
    assert not finding.confirmed
    assert report.exit_status == 1


def test_cast_points_that_do_not_matter_are_named(sweep_of):
    axes = {"rounding": ["fp32", "w:bf16/u:bf16/final_state:bf16/output:bf16"]}
    report = sweep_of("emulation.chunk", axes=axes, only=["rounding"])
    (finding,) = report.sweeps[0].findings
    assert finding.cast_points == ("final_state",)


def test_stochastic_rounding_is_taken_for_a_wrong_kernel(sweep_of):
    report = sweep_of("emulation.chunk", axes={"rounding": ["stochastic"]}, only=["rounding"])
    assert report.verdict == "pass"
