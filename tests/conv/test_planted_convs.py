"""Every planted fault of a convolution is found on plain cases, by its kind; sound twins are not blamed."""

from __future__ import annotations

import planted_conv
import pytest
import torch
from direct import Direct
from gdncheck.compare.ops.session import diff_op
from gdncheck.compare.ops.table import OPS
from generated import conv_inputs

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))]
# What the reason must say: the place where the fault lies.
SAID = {
    "window_shifted": "conv_output|final_conv_state",
    "window_of_tokens_shifted": "conv_output",
    "not_advanced": "final_conv_state",
    "short_forgets": "final_conv_state",
    "short_keeps_oldest": "final_conv_state",
    "one_token_drops_state": "conv_output|final_conv_state",
    "writes_where_read": "read one slot and write another",
    "short_writes_where_read": "read one slot and write another",
    "neighbour_leaks": "conv_output|final_conv_state",
    "ignores_fresh": "NaN, huge numbers and strangers",
    "always_fresh": "conv_output|final_conv_state",
    "padding_writes": "which no sequence of the call owns (the call has",
    "writes_next_slot": "which no sequence of the call owns|final_conv_state",
    "swaps_slots": "slots out of order|conv_output|final_conv_state",
    "silu_twice": "conv_output",
    "no_silu": "conv_output",
    "block_boundary": "conv_output",
    "last_channel": "conv_output",
    "small_channel": "channel 3|conv_output",
    "sums_in_bfloat16": "conv_output",
    "state_in_bfloat16": "final_conv_state",
    "bias_after_first": "conv_output",
}


def ruling_of(name, op, inputs, **capabilities):
    return diff_op(Direct(f"planted_conv:{name}", op, capabilities or None), OPS[op], inputs).ruling


def fault_inputs(name, seed, op="conv"):
    """A case on which the fault is one: rounding to bfloat16 is none in bfloat16, a bias must be there.

    With two taps no sequence is shorter than the window, and a state of one column cannot be turned.
    """
    dtype = torch.float32 if "bfloat16" in name and "state" not in name else None
    bias = True if "bias" in name else None
    needs_state = ("short", "window_shifted")
    width = 3 + seed % 2 if name.startswith(needs_state) else None
    return conv_inputs(seed, op=op, dtype=dtype, bias=bias, width=width)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", sorted(planted_conv.FAULTS))
def test_a_planted_fault_passes(name, seed):
    ruling = ruling_of(name, "conv", fault_inputs(name, seed))
    assert ruling.verdict == "fail", ruling.reason
    wanted = SAID[name].split("|")
    assert any(words in ruling.reason for words in wanted), ruling.reason
    assert ruling.worst_tile or ruling.first_nonfinite, "no place"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", sorted(planted_conv.UPDATE_FAULTS))
def test_a_planted_fault_of_a_decode_step_passes(name, seed):
    ruling = ruling_of(name, "conv-update", fault_inputs(name, seed, "conv-update"))
    assert ruling.verdict == "fail", ruling.reason


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*planted_conv.SOUND, "gathered", "stateless"])
def test_a_sound_convolution_is_blamed(name, seed):
    state = False if name == "stateless" else None
    ruling = ruling_of(name, "conv", conv_inputs(seed, state=state))
    assert ruling.verdict == "pass", ruling.reason


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(planted_conv.SOUND_UPDATES))
def test_a_sound_decode_step_is_blamed(name, seed):
    ruling = ruling_of(name, "conv-update", conv_inputs(seed, op="conv-update"))
    assert ruling.verdict == "pass", ruling.reason


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_a_sound_convolution_is_blamed_on_one_of_many_cases(seed):
    for name in planted_conv.SOUND:
        assert ruling_of(name, "conv", conv_inputs(seed)).verdict == "pass"
    for name in planted_conv.SOUND_UPDATES:
        assert ruling_of(name, "conv-update", conv_inputs(seed, op="conv-update")).verdict == "pass"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_a_planted_fault_passes_on_one_of_many_cases(seed):
    for name in planted_conv.FAULTS:
        assert ruling_of(name, "conv", fault_inputs(name, seed)).verdict == "fail", name
    for name in planted_conv.UPDATE_FAULTS:
        ruling = ruling_of(name, "conv-update", fault_inputs(name, seed, "conv-update"))
        assert ruling.verdict == "fail", name
