"""Synthetic cases: every family is canonical and in its documented range; one seed is one case anywhere."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from gdncheck.capture.casefile import hash_of, read_case, write_case
from gdncheck.capture.errors import BadInput
from gdncheck.capture.make import FAMILIES, make
from gdncheck.capture.synthetic import portable
from gdncheck.capture.synthetic.exact import KEY_REPEATS, KEY_WINDOW
from gdncheck.capture.validate import check_tensors
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = [70, 0, 1, 65]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Hashes of one small case per family: a change here means that a seed no longer names the case that
# somebody put in a report. Raise GENERATOR_VERSION and record them anew only for a deliberate change.
GOLDEN = {
    "qwen": "5aedf6deb05d4545",
    "gaussian": "6e9f4bde6c12abea",
    "forgotten-l2norm": "f06ad47a5d148d8e",
    "long-memory": "1d97e1b0447d4e6f",
    "exact": "07b3cf4739a634a4",
    "exact-raw": "bd74ce377d7b0919",
    "parallel-keys": "9c80fb64fdeabb19",
    "identical-keys": "4a8d6c8c65738e97",
    "negative-eigenvalues": "8f2e4b8c8c7d8efc",
    "beta-zero": "a16c419abc7c3cb6",
    "tiny-decay": "aac201ed4fe3130a",
    "no-decay": "5d712c89529034d3",
    "mixed-decay": "4d49217648dee7c4",
    "minus-inf": "25b3c29a59f3794c",
}


def drawn(family, **arguments):
    return make(family, **{"lengths": LENGTHS, "dims": (32, 16), "seed": 5, **arguments})


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_family_is_canonical_and_comes_back_from_disk(tmp_path, family, dtype):
    case = drawn(family, dtype=dtype, state=["random", "none", "stale", "zeros"])
    check_tensors(case.tensors, "rule", finite=case.finite, where="case")
    assert case["q"].dtype == case["k"].dtype == case["v"].dtype == case["beta"].dtype == DTYPES[dtype]
    back = read_case(write_case(case, tmp_path / "c.safetensors"))
    assert back.content_hash == case.content_hash
    assert back.finite == (family != "minus-inf")


def test_seed_names_the_same_case_on_every_machine():
    small = {"lengths": [3, 0, 20], "k_heads": 1, "v_heads": 2, "dims": (8, 4), "state": "random", "seed": 7}
    assert {family: make(family, **small).content_hash[:16] for family in FAMILIES} == GOLDEN


def test_thread_count_does_not_change_a_case():
    before = torch.get_num_threads()
    hashes = set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            hashes.add(make("qwen", lengths=[600], dims=(64, 64), state="random").content_hash)
    finally:
        torch.set_num_threads(before)
    assert len(hashes) == 1


def test_other_seed_or_family_gives_other_numbers():
    assert not torch.equal(drawn("qwen")["v"], drawn("qwen", seed=6)["v"])
    assert not torch.equal(drawn("qwen")["v"], drawn("gaussian")["v"])


def test_value_dim_does_not_change_the_keys():
    assert torch.equal(drawn("qwen")["k"], drawn("qwen", dims=(32, 8))["k"])


@settings(max_examples=60, deadline=None)
@given(
    family=st.sampled_from(list(FAMILIES)),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    k_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    dtype=st.sampled_from(list(DTYPES)),
    beta_dtype=st.sampled_from([None, "fp32"]),
    state=st.sampled_from(["none", "zeros", "random", "stale"]),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_sound_arguments_make_a_canonical_case(
    family, lengths, k_heads, group, dims, dtype, beta_dtype, state, seed
):
    case = make(
        family, lengths=lengths, k_heads=k_heads, v_heads=k_heads * group, dims=dims, dtype=dtype,
        beta_dtype=beta_dtype, state=state, seed=seed,
    )  # fmt: skip
    check_tensors(case.tensors, "rule", finite=case.finite, where="case")
    assert case.lengths == lengths
    assert case.content_hash == hash_of(case)
    assert (case.get("initial_state") is None) == (state == "none")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"lengths": []}, "lengths"),
        ({"lengths": [3, -1]}, "lengths"),
        ({"lengths": [2.5]}, "lengths"),
        ({"lengths": "40"}, "lengths"),
        ({"k_heads": 0}, "k-heads"),
        ({"v_heads": 3}, "multiple"),
        ({"dims": (64,)}, "dims"),
        ({"dims": (0, 64)}, "dims"),
        ({"dtype": "int8"}, "dtype"),
        ({"beta_dtype": "x"}, "dtype"),
        ({"state_dtype": "x"}, "dtype"),
        ({"state": "warm"}, "state 'warm'"),
        ({"state": ["none", "zeros"]}, "2 entries for 3 sequences"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"qk": "both"}, "qk"),
        ({"lengths": [10**9]}, "smaller"),
    ],
)
def test_argument_that_makes_no_case_is_refused_in_one_line(arguments, word):
    with pytest.raises(BadInput, match=word) as caught:
        make("qwen", **{"lengths": [1, 2, 3], **arguments})
    assert "\n" not in str(caught.value)


def test_unknown_family_lists_the_families():
    with pytest.raises(BadInput, match="parallel-keys"):
        make("quen", lengths=[3])


def test_state_words_per_sequence_say_who_starts_fresh():
    case = drawn("qwen", state="random,none,stale,zeros")
    state, has_state = case["initial_state"], case["has_initial_state"]
    assert has_state.tolist() == [True, False, False, True]
    assert [bool(s.any()) for s in state] == [True, False, True, False]


@pytest.mark.parametrize(
    "family", sorted(set(FAMILIES) - {"gaussian", "forgotten-l2norm", "exact", "exact-raw"})
)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_unit_keys_stay_within_the_slack_of_rounding(family, dtype):
    case = drawn(family, dtype=dtype, dims=(64, 8))
    slack = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 2.0**-22}[dtype]
    for name in "qk":
        assert float((case[name].double().square().sum(-1) - 1).abs().max()) <= slack


def test_gates_lie_where_each_family_says():
    g = {family: drawn(family)["g"] for family in FAMILIES}
    assert all(bool((x <= 0).all()) for x in g.values())
    for family in ("no-decay", "identical-keys"):
        assert not bool(g[family].any())
    assert bool((g["tiny-decay"].double() - math.log(1e-12)).abs().max() <= 0.5)
    assert float(g["long-memory"].min()) > -1e-4
    assert set(g["exact"].unique().tolist()) == {-1024.0, 0.0}
    assert not bool(g["exact"][:, ::2].any())
    assert float(g["mixed-decay"].min()) <= -100
    spikes = g["mixed-decay"][:, 0]
    assert int((spikes == 0).sum()) > 0.9 * len(spikes)
    infinite = torch.isneginf(g["minus-inf"])
    assert infinite.sum(0).tolist() == [3, 3, 3, 3], "one reset per sequence that has tokens, all heads"
    assert int(infinite[:70].any(1).nonzero()[0]) % 16


def test_beta_lies_where_each_family_says():
    beta = {family: drawn(family, beta_dtype="fp32")["beta"] for family in FAMILIES}
    assert bool((beta["parallel-keys"] >= 0.9).all())
    assert bool((beta["identical-keys"] == 1).all())
    assert not bool(beta["beta-zero"].any())
    assert float(beta["negative-eigenvalues"].max()) == 2.0
    assert set(beta["exact"].unique().tolist()) == {0.0, 1.0}
    for family in set(FAMILIES) - {"negative-eigenvalues"}:
        assert float(beta[family].min()) >= 0
        assert float(beta[family].max()) <= 1


def test_key_angles_lie_where_each_family_says():
    def cosines(family):
        k = drawn(family, dtype="fp32", dims=(64, 8))["k"].double()[:, 0]
        return (k @ k.T)[~torch.eye(len(k), dtype=torch.bool)]

    assert float(cosines("parallel-keys").min()) >= 0.99
    assert float(cosines("parallel-keys").min()) < 0.9999, "keys must not simply coincide"
    assert float(cosines("identical-keys").min()) > 1 - 1e-6
    assert float(cosines("no-decay").abs().max()) < 0.6
    k = make("qwen", lengths=[400], dtype="fp32")["k"].double()
    assert 0.4 < float((k[1:] * k[:-1]).sum(-1).mean()) < 0.7


def test_gaussian_keys_are_raw_and_forgotten_ones_are_flagged_normalised():
    for family, flag in (("gaussian", "raw"), ("forgotten-l2norm", "normalised")):
        case = drawn(family, dims=(64, 8))
        assert case.options.qk == flag
        assert 6 < float(case["k"].float().norm(dim=-1).mean()) < 10


@pytest.mark.parametrize("key_dim", [1, 3, 64])
def test_exact_keys_are_one_hot_and_repeat_at_most_eight_times_in_any_window(key_dim):
    case = make("exact", lengths=[300, 41], dims=(key_dim, 4), seed=2)
    k = case["k"].double()
    assert bool(((k == 0) | (k == 1)).all())
    assert bool((k.sum(-1) <= 1).all())
    busiest = 0
    for start, end in ((0, 300), (300, 341)):
        for first in range(start, max(end - KEY_WINDOW, start) + 1):
            busiest = max(busiest, int(k[first : min(first + KEY_WINDOW, end)].sum(0).max()))
    assert busiest == KEY_REPEATS


def test_exact_rows_of_v_and_state_are_all_different():
    case = make("exact", lengths=[200, 100], state="random")
    for head in range(4):
        rows = torch.cat((case["v"][:, head].float(), case["initial_state"][:, head].flatten(0, 1)))
        assert len(rows.unique(dim=0)) == len(rows)
    assert not torch.equal(case["initial_state"], case["initial_state"].mT)


def test_portable_functions_agree_with_the_library():
    x = torch.linspace(-700, 700, 20001, dtype=torch.float64)
    assert float((portable.exp(x) / torch.exp(x) - 1).abs().max()) < 1e-12
    assert float(portable.exp(torch.tensor([-701.0, -1e300], dtype=torch.float64)).max()) == 0
    y = torch.exp(torch.linspace(-50, 50, 20001, dtype=torch.float64))
    assert float((portable.log(y) - torch.log(y)).abs().max()) < 1e-12
    z = torch.linspace(-30, 30, 2001, dtype=torch.float64)
    assert float((portable.softplus(z) - torch.nn.functional.softplus(z)).abs().max()) < 1e-8
    rows = torch.randn(5, 37, dtype=torch.float64)
    assert torch.allclose(portable.unit(rows), torch.nn.functional.normalize(rows, dim=-1), atol=1e-14)


def test_normal_levels_are_the_quantiles_of_the_standard_normal():
    levels = portable.normal_levels()
    exact = statistics.NormalDist()
    for i in range(0, portable.LEVELS, 911):
        assert abs(exact.inv_cdf((i + 0.5) / portable.LEVELS) - float(levels[i])) < 1e-9
