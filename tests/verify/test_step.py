"""One verify step: each planted mistake of reading or writing a column fails at its place, sound steps pass.

What would be wrong without these: a step that starts from the wrong column, or leaves a state where the next
step does not look, computes plausible numbers for another sequence of tokens.
"""

from __future__ import annotations

import random
import re

import planted_verify
import pytest
import torch
from gdncheck.capture.errors import BadInput
from gdncheck.capture.make import make
from gdncheck.capture.validate import check_tensors
from gdncheck.compare.cut import first_tokens
from gdncheck.compare.inputs import call_of
from gdncheck.compare.session import Settings, diff_one
from gdncheck.compare.soundness import soundness_of
from gdncheck.compare.tolerances import tolerances
from gdncheck.compare.witness import Witness


def step_case(seed, family=None, **more):
    """A drawn step: a draft of 1..8, sequences of 1..1+draft tokens, one of them full."""
    dice = random.Random(seed)
    draft = dice.randint(1, 8)
    n = dice.randint(2, 4)
    lengths = [dice.randint(1, 1 + draft) for _ in range(n)]
    lengths[dice.randrange(n)] = 1 + draft
    k_heads = dice.choice([1, 2])
    case = make(
        family or dice.choice(["qwen", "gaussian", "exact"]), lengths=lengths, k_heads=k_heads,
        v_heads=k_heads * dice.choice([1, 2]), dims=dice.choice([(16, 16), (16, 32)]),
        dtype=dice.choice(["bf16", "fp32"]), state="random", draft=draft, seed=seed,
        **more,
    )  # fmt: skip
    return case


def differs(case, function, in_process):
    """Whether a fault shows in what is promised: outputs of tokens, columns, slots of nobody."""
    ours, sound = (in_process(f).run([call_of(case)])[0].outputs for f in (function, planted_verify.sound))
    return any(not torch.equal(ours[name], sound[name]) for name in ("output", "pool"))


@pytest.mark.parametrize("seed", range(4))
def test_sound_step_passes(verdict_on, seed):
    result = verdict_on(planted_verify.sound, step_case(seed))
    assert result.verdict == "pass", result.ruling.reason


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sound_step_on_a_pool_of_narrow_dtype_passes(verdict_on, dtype):
    case = step_case(3, "qwen", state_dtype=dtype)
    assert verdict_on(planted_verify.sound, case).verdict == "pass"


@pytest.mark.parametrize("name", sorted(planted_verify.FAULTS))
def test_planted_fault_fails_wherever_it_shows(verdict_on, in_process, name):
    function, shown = planted_verify.FAULTS[name], 0
    for seed in range(40, 60):
        case = step_case(seed)
        if name == "StaleFreshSequence":
            fresh = torch.arange(case.n_sequences) == seed % case.n_sequences
            case = case.with_tensors(has_initial_state=~fresh)
        if not differs(case, function, in_process):
            continue
        result = verdict_on(function, case)
        assert result.verdict == "fail", f"seed {seed}: {result.verdict}, {result.ruling.reason}"
        place = result.ruling.first_nonfinite or result.ruling.worst_tile
        assert place is not None, f"seed {seed}"
        shown += 1
        if shown == 2:
            break
    assert shown >= 2, "the fault was hardly exercised"


PLACES = {
    "AcceptedOffByOne": ("starts from slot", "not from slot"),
    "NeighboursColumn": ("starts from slot", "column"),
    "LastColumnNotWritten": ("was not written",),
    "ColumnsReversed": ("holds the state after token",),
    "OverTheBaseColumn": ("slot", "column"),
    "StraySlotWritten": ("which is no sequence's", "was written to slot"),
    "NeighbourWritten": ("the state after token 0 of sequence",),
}


@pytest.mark.parametrize("name", sorted(PLACES))
def test_the_reason_says_which_column_was_read_or_written(verdict_on, name):
    # Two sequences of which the second is short: columns without a token, accepted counts that differ.
    case = make(
        "gaussian", lengths=[4, 2], k_heads=1, v_heads=2, dims=(16, 32), state="random", draft=3, seed=8
    ).with_tensors(num_accepted=torch.tensor([2, 4]))
    pool = case["pool"].clone()
    pool[case["slot_indices"][0, 1]] *= 1.5
    result = verdict_on(planted_verify.FAULTS[name], case.with_tensors(pool=pool))
    assert result.verdict == "fail"
    for words in PLACES[name]:
        assert words in result.ruling.reason, result.ruling.reason


def test_padded_row_of_a_step_owns_nothing_and_is_not_judged(verdict_on):
    case = step_case(5, "qwen")
    slots = case["slot_indices"].clone()
    slots[1] = -1
    assert verdict_on(planted_verify.sound, case.with_tensors(slot_indices=slots)).verdict == "pass"


def test_kernel_without_columns_is_skipped_with_what_it_would_need(verdict_on):
    def plain(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
        raise AssertionError("never called")

    plain.gdncheck_capabilities = {}
    result = verdict_on(plain, step_case(1))
    assert result.verdict == "skipped"
    assert "declares columns" in result.ruling.reason


def test_nan_in_a_rejected_column_blames_nobody_and_reaches_nothing(verdict_on):
    case = step_case(9, "qwen")
    pool = case["pool"].clone()
    start = case["slot_indices"].gather(1, (case["num_accepted"] - 1)[:, None])[:, 0].tolist()
    for slot in range(len(pool)):
        if slot not in start:
            pool[slot] = torch.nan
    poisoned = case.with_tensors(pool=pool)
    assert verdict_on(planted_verify.sound, poisoned).verdict == "pass"
    bad = verdict_on(planted_verify.FAULTS["AcceptedOffByOne"], poisoned)
    assert bad.verdict == "fail"
    assert bad.ruling.first_nonfinite is not None


@pytest.mark.parametrize("n_tokens", [1, 2, 9])
def test_first_tokens_of_a_step_are_a_step_of_their_own(verdict_on, n_tokens):
    case = first_tokens(step_case(6, "qwen"), n_tokens)
    assert case.op == "verify"
    assert case.n_sequences == 1
    assert verdict_on(planted_verify.sound, case).verdict == "pass"
    check_tensors(case.tensors, "verify", finite=True, where="cut")


def test_tolerances_do_not_excuse_a_step(in_process):
    case = step_case(6, "qwen")
    witness = Witness(case)
    settings = Settings(tolerances=tolerances(1e9, None))
    with pytest.raises(BadInput, match="leave --atol"):
        diff_one(in_process(planted_verify.sound), witness, soundness_of(witness), settings)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_accepted": [0, 1]}, "num_accepted[0] is 0 but slot_indices has columns 1..4"),
        ({"num_accepted": [1, 5]}, "num_accepted[1] is 5"),
        ({"draft": [4, 1]}, "draft[0] is 4 of 3 tokens"),
    ],
)
def test_step_that_is_none_is_refused_by_the_case_file(changed, message):
    case = make("qwen", lengths=[3, 2], k_heads=1, v_heads=1, dims=(8, 8), state="random", draft=3)
    wrong = case.with_tensors(**{name: torch.tensor(value) for name, value in changed.items()})
    with pytest.raises(BadInput, match=re.escape(message)):
        check_tensors(wrong.tensors, "verify", finite=True, where="case")


def test_made_step_needs_a_column_per_token():
    with pytest.raises(BadInput, match="up to 3"):
        make("qwen", lengths=[4], draft=2)
    case = make("exact", lengths=[3, 0, 1], k_heads=1, v_heads=1, dims=(8, 8), draft=2, seed=5)
    again = make("exact", lengths=[3, 0, 1], k_heads=1, v_heads=1, dims=(8, 8), draft=2, seed=5)
    assert case.op == "verify"
    assert case.content_hash == again.content_hash
    assert len(set(case["slot_indices"].flatten().tolist())) == 9
