"""Public faults of the gate: overflow of exp, guards that zero, -inf, the wrong space (rows 3, 4, 5, 13).

Each is a family around the reported input: a sound kernel passes on every member, one with the fault fails
where the fault lies. Numbers are rows of the list of public faults.
"""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
import torch
from faulty_model import Fault, family
from faulty_run import verdict_on
from gdncheck.capture.make import make

FACTORED, CLAMPED = "exponential_factored", "guard_clamps_the_differences"
SHAPE = {"k_heads": 1, "v_heads": 2, "dims": (32, 32), "state": "random"}
FLOAT32_EXP = 88.7  # exp of more is Inf in float32


def with_gates(g, lengths=(64,), dtype="bf16", seed=0):
    """A case with these gates in every head; g: a number or [T]."""
    case = make("qwen", lengths=list(lengths), dtype=dtype, seed=seed, **SHAPE)
    values = torch.as_tensor(g, dtype=torch.float32).reshape(-1, 1)
    return case.with_tensors(g=values.expand(case.n_tokens, 2).contiguous())


# Row 3: exp of the negative decay sum.


@pytest.mark.parametrize(
    "log_decay", family([-1.3, -1.4, -20.0, math.log(1e-12), -0.5, -1.0, -2.5, -5.0, -6.0, -100.0], keep=4)
)
def test_a_decay_sum_past_exp_overflows_unnoticed_or_a_sound_kernel_is_blamed(log_decay):
    case = with_gates(log_decay, dtype="bf16" if log_decay > -6 else "fp32")
    assert verdict_on("chunk", case).verdict == "pass"
    assert verdict_on("recurrent", case).verdict == "pass"
    broken = verdict_on(FACTORED, case).ruling
    overflows = -64 * log_decay > FLOAT32_EXP
    assert broken.verdict == ("fail" if overflows else "pass"), broken.reason
    assert not overflows or (broken.tier == 1 and broken.first_nonfinite is not None)


@pytest.mark.parametrize(
    ("token", "spike"), family([(40, -2661.0), (0, -1000.0), (1, -100.0), (63, -1000.0)], keep=2)
)
def test_one_huge_gate_among_zeros_goes_wrong_unnoticed(token, spike):
    g = torch.zeros(64)
    g[token] = spike
    case = with_gates(g)
    assert verdict_on("chunk", case).verdict == "pass"
    broken = verdict_on(FACTORED, case).ruling
    assert broken.verdict == "fail"
    assert broken.first_nonfinite.token <= max(token, 1)


@pytest.mark.parametrize("log_decay", family([-6.0, -2.5, -20.0], keep=1))
def test_a_wrong_finite_answer_before_the_overflow_passes(log_decay):
    """Kernels that clamp the difference stay finite and forget too little."""
    broken = verdict_on(CLAMPED, with_gates(log_decay)).ruling
    assert (broken.verdict, broken.first_nonfinite) == ("fail", None)


# Row 4: a NaN guard that zeroes valid entries.


@pytest.mark.parametrize("share", family([0.3, 1.0], keep=1))
@pytest.mark.parametrize(
    "fault",
    [
        "guard_zeroes_a_gate_of_one",
        "guard_zeroes_a_gate_of_one_off_the_diagonal",
        "guard_zeroes_growth_of_one",
    ],
)
def test_a_guard_that_zeroes_gates_of_one_passes(fault, share):
    dice = torch.Generator().manual_seed(int(share * 10))
    g = -torch.rand(130, generator=dice) * 0.2
    g[torch.rand(130, generator=dice) < share] = 0.0
    g[:3] = 0.0  # the first tokens' growth is one too
    case = with_gates(g, lengths=(130,))
    assert verdict_on("chunk", case).verdict == "pass"
    assert verdict_on(fault, case).verdict == "fail"


def test_a_kernel_that_takes_no_gate_for_a_strong_one_passes():
    case = make("no-decay", lengths=[70, 65], **SHAPE)
    assert verdict_on("chunk", case).verdict == "pass"
    assert verdict_on("guard_zeroes_a_gate_of_one", case).verdict == "fail"


# Row 5: a -inf gate.

IGNORED = Fault({"decay": lambda d, run: torch.where(d == 0, 1.0, d)}, base="recurrent")
PROMISE = {"gate.inf": "-inf is a reset"}


@pytest.mark.parametrize("token", family([20, 64, 0, 69], keep=2))
def test_a_minus_inf_gate_is_blamed_or_excused_wrongly(token):
    g = -torch.rand(70, generator=torch.Generator().manual_seed(token)) * 0.2
    g[token] = -torch.inf
    case = with_gates(g, lengths=(70,))
    assert verdict_on("recurrent", case).verdict == "pass"
    # Subtracted sums give NaN: outside what such a kernel promises, and a fault of one that promises it.
    silent = verdict_on("chunk", case).ruling
    assert silent.verdict == "out-of-contract"
    assert f"token {token} of sequence 0" in silent.reason
    assert "contract does not promise" in silent.reason
    promised = verdict_on(Fault({}, clauses=PROMISE), case).ruling
    assert (promised.verdict, promised.tier) == ("fail", 1)
    ignored = verdict_on(replace(IGNORED, clauses=PROMISE), case).ruling
    assert ignored.verdict == "fail", ignored.reason


# Row 13: gate space.


@pytest.mark.parametrize("seed", family(range(3), keep=1))
def test_a_linear_decay_handed_over_as_a_log_blames_the_kernel(seed):
    case = make("qwen", lengths=[70, 5], seed=seed, **SHAPE)
    linear = case.with_tensors(g=case["g"].exp())
    ruling = verdict_on("chunk", linear).ruling
    assert ruling.verdict == "out-of-contract"
    assert "g is" in ruling.reason
    assert "linear" in ruling.reason
    declared = msgspec.structs.replace(
        linear, options=msgspec.structs.replace(linear.options, gate_space="linear")
    )
    assert verdict_on("chunk", declared).verdict == "pass"


@pytest.mark.parametrize("seed", family(range(3), keep=1))
def test_a_log_handed_over_as_a_linear_decay_blames_the_kernel(seed):
    case = make("qwen", lengths=[70, 5], seed=seed, **SHAPE)
    wrong = msgspec.structs.replace(case, options=msgspec.structs.replace(case.options, gate_space="linear"))
    ruling = verdict_on("chunk", wrong).ruling
    assert ruling.verdict == "out-of-contract"
    assert "g is" in ruling.reason
