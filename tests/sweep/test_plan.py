"""What is tried and in what order: single changes, covering pairs, delta debugging, bisection, baselines."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from gdncheck.capture.errors import BadInput
from gdncheck.compare.axes.axis import Situation
from gdncheck.compare.axes.table import AXES
from gdncheck.compare.sweep.baseline import baseline_for, read_baseline, shipped
from gdncheck.compare.sweep.configuration import deviations_of
from gdncheck.compare.sweep.ddmin import ddmin, smallest_failing
from gdncheck.compare.sweep.plan import Covering, choice_of, plan_of, product, product_size, singles
from gdncheck.kernels.contract import Capabilities, Contract
from gdncheck.kernels.interface import KernelInfo
from hypothesis import given, settings
from hypothesis import strategies as st

INFO = KernelInfo(name="k", capabilities=Capabilities(chunk_sizes=(16, 64)), contract=Contract(kernel="k"))


@pytest.fixture
def planned(small_case):
    """planned(axes=..., only=...) -> (plan, baseline)."""

    def build(axes=None, only=(), excepted=(), given=None):
        situation = Situation(case=small_case(), info=INFO)
        baseline, _ = baseline_for(given or {}, situation)
        return plan_of(choice_of(axes or {}, only, excepted), situation, baseline), baseline

    return build


def test_the_baseline_or_the_listed_order_does_not_come_first(planned):
    plan, baseline = planned()
    tried = [deviations_of(c, baseline) for c in singles(plan, baseline)]
    assert tried[0] == {}
    assert all(len(d) == 1 for d in tried[1:])
    order = [list(AXES).index(next(iter(d))) for d in tried[1:]]
    assert order == sorted(order)


def test_the_product_repeats_or_forgets_a_configuration(planned):
    plan, baseline = planned(
        {"memory": ["nan"], "state": ["zeros", "random"]}, ["memory", "state", "chunk_size"]
    )
    every = [*singles(plan, baseline), *product(plan, baseline)]
    assert len(every) == len({str(c) for c in every}) == product_size(plan) == 2 * 3 * 2
    counts = [len(deviations_of(c, baseline)) for c in every]
    assert counts == sorted(counts)


CHANGES = st.dictionaries(
    st.sampled_from("abcdef"), st.lists(st.sampled_from("1234"), min_size=1, unique=True)
)


@settings(max_examples=60, deadline=None)
@given(changes=CHANGES, data=st.data())
def test_a_pair_of_changes_is_in_no_row(changes, data):
    every = [(n, v) for n, values in changes.items() for v in values]
    pairs = {p for p in itertools.combinations(every, 2) if p[0][0] != p[1][0]}
    bad = data.draw(st.sampled_from(sorted(pairs))) if pairs else None
    covering, seen, hidden = Covering(changes, without=set()), set(), set()
    for row in covering.rows():
        mine = set(itertools.combinations(row.items(), 2))
        if bad in mine:
            # As the search does with what fails: the row told nothing about its other pairs.
            hidden |= mine
            covering.forbid(dict(bad))
            covering.alone += [r for n, _ in bad if len(r := {k: v for k, v in row.items() if k != n}) > 1]
        else:
            seen |= mine
    assert pairs <= seen | {bad}
    assert hidden - {bad} <= seen


def test_rows_of_a_covering_array_are_as_many_as_pairs():
    changes = {name: list("1234") for name in "abcdefgh"}
    rows = list(Covering(changes, without=set()).rows())
    assert len(rows) < 50  # of 448 pairs; 16 is the least
    assert not any(row.get("a") == "1" for row in Covering(changes, without={("a", "1")}).rows())


def test_a_row_that_could_not_run_counts_as_covered():
    covering = Covering({"a": ["1"], "b": ["1"], "c": ["1"]}, without=set())
    rows = covering.rows()
    covering.again(next(rows))
    assert [sorted(r) for r in rows] == [["a", "b"], ["a", "c"], ["b", "c"]]


@settings(max_examples=150, deadline=None)
@given(size=st.integers(0, 12), wanted=st.sets(st.integers(0, 11), max_size=4))
def test_delta_debugging_keeps_more_than_matters(size, wanted):
    wanted = {w for w in wanted if w < size}
    assert ddmin(range(size), lambda part: wanted <= set(part)) == sorted(wanted)


@settings(max_examples=100, deadline=None)
@given(longest=st.integers(1, 5000), data=st.data())
def test_bisection_misses_the_smallest(longest, data):
    smallest = data.draw(st.integers(1, longest))
    guess = data.draw(st.none() | st.integers(0, longest + 5))
    found = smallest_failing(lambda n: n >= smallest, longest, guess=guess, tries=20)
    assert found == (smallest, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (({"splitt": ["none"]}, [], []), "'splitt' is no axis"),
        (({"split": ["at-0"]}, [], []), "'at-0' is no value of split"),
        (({"split": []}, [], []), "at least one value"),
        (({}, ["memmory"], []), "--only: 'memmory'"),
        (({}, ["memory"], ["memory"]), "both name memory"),
        (({"split": ["at-3"]}, ["memory"], []), "left out"),
    ],
)
def test_a_wrong_choice_of_axes_is_taken(arguments, words):
    with pytest.raises(BadInput, match=words):
        choice_of(*arguments)


def test_spellings_of_a_dtype_are_different_values():
    choice = choice_of({"state_dtype": ["bf16", "bfloat16"], "beta_dtype": ["float16"]}, [], [])
    assert choice.values == {"state_dtype": ("bfloat16",), "beta_dtype": ("fp16",)}


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_baseline_is_no_baseline(name, small_case):
    given = read_baseline(name)
    situation = Situation(case=small_case(lengths=[9000], qk="raw", beta_dtype="fp32"), info=INFO)
    capable = msgspec.structs.replace(INFO.capabilities, l2norm="both")
    baseline, left = baseline_for(given, msgspec.structs.replace(
        situation, info=msgspec.structs.replace(INFO, capabilities=capable)
    ))  # fmt: skip
    assert set(baseline) == set(AXES)
    assert all(row["axis"] == "beta_dtype" for row in left)


def test_all_four_engines_have_a_baseline():
    assert shipped() == ["hf", "sglang", "vllm-0.19", "vllm-0.33"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chunk_size = ", "is no TOML"),
        ("chunk-size = 64", "did you mean chunk_size"),
        ("split = 'at'", "'at' is no value of split"),
        ("heads = true", "heads is bool"),
        ("state = ['none']", "state is list"),
        ("split = 2.5", "split is float"),
        (None, "no such file, and no baseline of that name; shipped are hf"),
    ],
)
def test_a_wrong_baseline_is_read(text, words, tmp_path):
    path = tmp_path / "own.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match=words) as error:
        read_baseline(str(path))
    assert "\n" not in str(error.value)


def test_a_baseline_that_a_kernel_cannot_take_goes_unsaid(planned, small_case):
    baseline, left = baseline_for({"chunk_size": "32"}, Situation(case=small_case(), info=INFO))
    assert baseline["chunk_size"] == "64"
    assert left == [
        {
            "axis": "chunk_size",
            "value": "32",
            "reason": "of the baseline; 64 instead: the kernel takes 16, 64",
        }
    ]
