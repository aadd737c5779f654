"""Public faults of packing: leaks, tails, one-token sequences, slots, splits (rows 6 to 12 and 20).

Each is a family around the reported input: a sound kernel passes on every member, one with the fault fails
where the fault lies. Numbers are rows of the list of public faults.
"""

from __future__ import annotations

import pytest
import torch
from faulty_model import Fault, family
from faulty_run import Direct, verdict_on
from gdncheck.capture.make import make
from gdncheck.compare.inputs import call_of, inputs_of, take_sequences
from gdncheck.compare.judge import judge
from gdncheck.compare.soundness import soundness_of
from gdncheck.compare.trial import Trial
from gdncheck.compare.witness import Witness

SHAPE = {"k_heads": 1, "v_heads": 2, "dims": (32, 32), "state": "random"}


def packed(lengths, **changed):
    return make("qwen", lengths=list(lengths), **{**SHAPE, **changed})


# Row 6: the future leaks into the past, most of all where T is no multiple of 16.


def unmasked_in_the_last_tile(mask, run):
    """Rows of a partial 16-row tile see its later columns."""
    tile = torch.arange(run.length) // 16
    partial = (tile == tile[-1]) & (run.length % 16 != 0)
    return mask | (partial[:, None] & partial[None, :])


@pytest.mark.parametrize("length", family([39, 128, 18, 70, 141], keep=2))
def test_a_mask_that_fails_in_the_last_partial_tile_passes(length):
    case = packed([length])
    ruling = verdict_on(Fault({"qk_mask": unmasked_in_the_last_tile}), case, relations="quick").ruling
    if length % 16 == 0:
        assert ruling.verdict == "pass"
        return
    assert ruling.verdict == "fail"
    assert ruling.worst_tile.token >= length - length % 16
    causal = [o for o in ruling.outcomes if o.check.startswith("causality")]
    assert causal
    assert verdict_on("chunk", case, relations="quick").verdict == "pass"


# Row 7: an uninitialised tail.


@pytest.mark.parametrize("length", family([1, 65, 15, 17, 39, 63], keep=2))
def test_a_tail_that_nothing_writes_passes(length, bench):
    """The call ends in a partial tile; the last row of the buffer is whatever the allocator gave."""
    case = packed([40, length])
    ruling = bench.judge("last_row_holds_fresh_memory", case).ruling
    assert ruling.verdict == "fail", ruling.reason
    place = ruling.worst_tile or ruling.first_nonfinite
    assert (place.tensor, place.sequence, place.token) == ("output", 1, length - 1)
    assert bench.judge("chunk", case).verdict == "pass"


# Row 8: a stale or poisoned slot.


def pool_of(fill, order, fresh, seed):
    """Four sequences whose slots are a permutation of seven; `fresh` ones must start from zero."""
    case = make("qwen", lengths=[40, 0, 1, 70], **{**SHAPE, "seed": seed})
    dice = torch.Generator().manual_seed(seed)
    state = case["initial_state"]
    others = torch.randn(7, *state.shape[1:], generator=dice)
    pool = others if fill == "tenant" else torch.full_like(others, fill)
    slots = torch.tensor(order)
    has_state = torch.tensor([n not in fresh for n in range(4)])
    pool[slots[has_state]] = state[has_state]
    return case.with_tensors(initial_state=None, pool=pool, slot_indices=slots, has_initial_state=has_state)


POOLS = [
    (float("nan"), [4, 1, 5, 2], (2, 3)),
    (1e30, [0, 6, 3, 1], (0, 3)),
    ("tenant", [2, 0, 1, 3], (0, 2)),
    ("tenant", [6, 5, 4, 3], (1, 3)),
]


@pytest.mark.parametrize(("fill", "order", "fresh"), family(POOLS, keep=2))
def test_a_slot_of_another_tenant_is_read_or_written_unnoticed(fill, order, fresh, bench):
    case = pool_of(fill, order, fresh, seed=len(order))
    assert bench.judge("chunk", case).verdict == "pass"
    stale = bench.judge("stale_state_used", case).ruling
    assert stale.verdict == "fail", stale.reason
    assert (stale.worst_tile or stale.first_nonfinite).sequence in fresh
    written = bench.judge("a_slot_of_no_sequence_is_written", case).ruling
    assert (written.verdict, written.tier) == ("fail", 4)
    assert bench.judge("slots_written_in_order", case).verdict == "fail"
    assert bench.judge("slots_read_in_order", case).verdict == "fail"


# Row 9: a prefill in parts.

LONG = 474


def in_parts(kernel, case, cuts, handed):
    """The call cut into successive ones, the state handed on in a dtype; output and final state."""
    inputs, outputs, state = inputs_of(case), [], None
    for start, end in zip([0, *cuts], [*cuts, LONG], strict=True):
        part = take_sequences(inputs, [0], skip=[start])
        part = take_sequences(part, [0], tokens=[end - start])
        call = case.with_tensors(
            q=part.q, k=part.k, v=part.v, g=part.g, beta=part.beta, cu_seqlens=part.cu_seqlens,
            initial_state=case["initial_state"] if state is None else state,
        )  # fmt: skip
        answer = Direct(kernel).run([call_of(call)])[0].outputs
        outputs.append(answer["output"])
        state = answer["final_state"].to(handed).float()
    return torch.cat(outputs), state


SOUND = Fault({})


@pytest.fixture(scope="module")
def long_case():
    case = packed([LONG])
    witness = Witness(case)
    witness.truth()
    return case, witness


@pytest.mark.parametrize(
    "cuts",
    family([[63, 65, 320], [LONG - 1], [1], [64], [128, 191, 320], [447, 449]], keep=2),
)
def test_a_prefill_in_parts_departs_from_the_uncut_one(cuts, long_case):
    case, witness = long_case
    output, state = in_parts(SOUND, case, cuts, torch.float32)
    trial = Trial(witness, Direct(SOUND).info, output, state)
    assert judge(trial, soundness_of(witness), []).verdict == "pass"
    # A bfloat16 hand-over costs half an ulp of the state at each cut, which later decay only shrinks.
    output, state = in_parts(SOUND, case, cuts, torch.bfloat16)
    rounded = Trial(witness, Direct(SOUND).info, output, state)
    for name in ("output", "state"):
        assert rounded.measured[name].relative < trial.measured[name].relative + len(cuts) * 2.0**-8
    # One that loses the state at a cut is wrong from there on.
    lost = Fault({"start": lambda s, run: 0 * s})
    output, state = in_parts(
        lost, case.with_tensors(initial_state=0 * case["initial_state"]), cuts, torch.float32
    )
    zero = Witness(case.with_tensors(initial_state=0 * case["initial_state"]))
    ruling = judge(Trial(zero, Direct(SOUND).info, output, state), soundness_of(zero), [])
    assert ruling.verdict == "fail"
    assert ruling.worst_tile.tensor == "state" or ruling.worst_tile.token >= cuts[0] - 63


@pytest.mark.parametrize("fault", ["initial_state_ignored", "state_read_transposed"])
def test_a_kernel_that_cannot_go_on_passes_on_a_case_without_states(fault):
    case = packed([130], state="none")
    ruling = verdict_on(fault, case, relations="all").ruling
    assert ruling.verdict == "fail"
    assert "split" in {o.check.partition("-")[0] for o in ruling.outcomes if o.status == "fires"}
    assert verdict_on("chunk", case, relations="all").verdict == "pass"


# Row 10: one-token sequences among long ones.


@pytest.mark.parametrize("lengths", family([[1, 65, 1, 64, 1], [1, 1, 1, 200], [200, 1, 1, 1]], keep=1))
@pytest.mark.parametrize(
    "fault", ["one_token_sequence_is_not_written_back", "one_token_sequence_takes_its_neighbours_state"]
)
def test_a_one_token_sequence_among_long_ones_goes_wrong_unnoticed(fault, lengths):
    case = packed(lengths)
    assert verdict_on("chunk", case).verdict == "pass"
    ruling = verdict_on(fault, case).ruling
    assert ruling.verdict == "fail"
    assert lengths[ruling.worst_tile.sequence] == 1


# Row 11: packed samples leak into each other.


@pytest.mark.parametrize("lengths", family([[5, 3, 62], [64, 1, 5], [17, 130]], keep=1))
@pytest.mark.parametrize(
    "fault",
    [
        Fault({"start": lambda s, run: run.state if run.sequence and run.call.state is None else s}),
        "cumsum_carried_over_a_sequence",
        "decay_of_the_next_token",
    ],
    ids=["state carried on", "cumsum carried on", "gates read one token on"],
)
def test_packed_samples_that_leak_pass(fault, lengths):
    state = "none" if isinstance(fault, Fault) else "random"
    case = packed(lengths, state=state)
    assert verdict_on("chunk", case).verdict == "pass"
    ruling = verdict_on(fault, case, relations="quick").ruling
    assert ruling.verdict == "fail"
    if isinstance(fault, Fault):
        assert ruling.worst_tile.sequence >= 1
        fired = {o.check for o in ruling.outcomes if o.status == "fires"}
        assert "isolation" in fired


# Row 12: the state's layout.


@pytest.mark.parametrize("state", family(["zeros", "random", "none"], keep=1))
@pytest.mark.parametrize("fault", ["state_returned_transposed", "state_read_transposed"])
def test_a_transposed_state_hides_behind_a_state_of_zeros(fault, state):
    case = packed([70, 65], state=state)
    assert verdict_on(fault, case, relations="all").verdict == "fail"


def test_a_transposed_state_with_k_unlike_v_is_not_named():
    case = packed([70], dims=(64, 32))
    ruling = verdict_on(Fault({"final": lambda s, run: s.mT.contiguous()}), case).ruling
    assert (ruling.verdict, ruling.tier) == ("fail", 0)
    assert "K and V are swapped" in ruling.reason


# Row 20: the share of one rank.


@pytest.mark.parametrize("ranks", family([2, 4], keep=1))
def test_a_rank_does_not_get_the_slice_of_the_whole(ranks):
    case = packed([70, 1], k_heads=4, v_heads=8)
    four = Fault({"output": lambda o, run: o.roll(1, 1) if run.hv == 8 // ranks else o})
    whole, _ = answer_of(SOUND, case)
    for rank in range(ranks):
        share = slice_of(case, rank, ranks)
        assert verdict_on("chunk", share).verdict == "pass"
        output, _ = answer_of(SOUND, share)
        per = 8 // ranks
        assert torch.equal(output, whole[:, rank * per : (rank + 1) * per])
        assert verdict_on(four, share).verdict == "fail"
    assert verdict_on(four, case).verdict == "pass"


def answer_of(fault, case):
    outputs = Direct(fault).run([call_of(case)])[0].outputs
    return outputs["output"], outputs["final_state"]


def slice_of(case, rank, ranks):
    """The heads of one rank of a tensor-parallel run."""

    def part(x, axis):
        return x.chunk(ranks, dim=axis)[rank].contiguous()

    changed = {name: part(case[name], 1) for name in ("q", "k", "v", "g", "beta", "initial_state")}
    return case.with_tensors(**changed)
