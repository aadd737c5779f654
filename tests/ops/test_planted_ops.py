"""Planted faults around the rule: the first operation that departs is named; the sound twin is silent."""

from __future__ import annotations

import itertools

import pytest
import torch
from gdncheck.capture.synthetic.core import make_core
from gdncheck.compare.ops.chain_verdict import first_departing
from gdncheck.kernels.planted_ops import FAULTS
from op_direct import emulated, planted, run_chain

DTYPES = ("bf16", "fp16", "fp32")
SHAPES = (
    {"lengths": [19, 1, 8], "k_heads": 1, "v_heads": 2},
    {"lengths": [5, 26], "k_heads": 2, "v_heads": 2},
    {"lengths": [30], "k_heads": 1, "v_heads": 3},
)
# Every fault on each family that shows it, dtypes and shapes in turn.
FIRES = [
    (name, family, DTYPES[n % 3], SHAPES[n % 3 if n % 2 else (n + 1) % 3])
    for n, (name, family) in enumerate((name, f) for name, fault in FAULTS.items() for f in fault.families)
]
# One of each operation in every run of the tests; the whole product is in the slow ones.
QUICK = (
    "conv_window_shifted",
    "split_k_before_q",
    "l2norm_eps_outside",
    "gate_no_dt_bias",
    "norm_gate_first",
)
FIRST = [next(c for c in FIRES if c[0] == name) for name in FAULTS]
SILENT = ("core-qwen", "core-wide-gate", "core-quiet", "core-large", "core-exact")


def check(name, family, dtype, shape, seed):
    op, kernel = planted(name)
    case = make_core(family, dtype=dtype, seed=seed, **shape)
    ruling, findings = run_chain(case, **{op: kernel})
    first = first_departing(findings)
    assert first is not None, f"nothing departs: {ruling.reason}"
    assert (first.op, first.made) == (op, True), ruling.reason
    assert ruling.verdict in ("fail", "suspect")
    assert not [f.op for f in findings if f.made and f.op != op], ruling.reason


@pytest.mark.parametrize(
    ("name", "family", "dtype", "shape"),
    [pytest.param(*c, id=c[0], marks=() if c[0] in QUICK else pytest.mark.slow) for c in FIRST],
)
def test_another_operation_is_blamed_for_a_planted_fault(name, family, dtype, shape):
    check(name, family, dtype, shape, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "family"), [(n, f) for n, x in FAULTS.items() for f in x.families], ids=lambda x: x
)
def test_a_planted_fault_is_missed_or_misplaced_on_some_family_and_dtype(name, family, dtype, seed):
    check(name, family, dtype, SHAPES[seed % 3], seed)


def silent(family, dtype, shape, seed):
    ruling, findings = run_chain(make_core(family, dtype=dtype, seed=seed, **shape))
    assert ruling.verdict == "pass", ruling.reason
    assert first_departing(findings) is None


@pytest.mark.parametrize(
    ("family", "dtype"), [(f, DTYPES[n % 3]) for n, f in enumerate(SILENT)], ids=lambda x: x
)
def test_a_sound_chain_is_accused(family, dtype):
    silent(family, dtype, SHAPES[0], seed=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "shape"), list(itertools.product(SILENT, DTYPES, range(3))), ids=str
)
def test_a_sound_chain_is_accused_on_some_family_dtype_and_shape(family, dtype, shape):
    for seed in range(3):
        silent(family, dtype, SHAPES[shape], seed)


def test_bits_are_lost_between_the_convolution_and_the_norm_where_nothing_needs_rounding():
    case = make_core("core-exact", dtype="bf16", seed=5, **SHAPES[0])
    _, findings = run_chain(case)
    exact = {f.op for f in findings if f.reason.startswith("exact case: every bit")}
    assert {"l2norm", "gate", "rule", "norm"} <= exact
    # eps leaves 1e-15 in the float64 truth.
    assert all(error < 1e-12 for f in findings for error in f.error.values())


def test_one_wrong_bit_of_the_exact_chain_goes_unseen():
    def nudged(op, runner):
        inner = runner.adapter.run

        def run(call):
            outputs = inner(call)
            name = next(iter(outputs))
            row = outputs[name].flatten().nonzero()[0]
            flat = outputs[name].view(torch.int16).flatten()
            flat[row] += 1
            return outputs

        runner.adapter.run = run
        return runner

    case = make_core("core-exact", dtype="bf16", seed=5, **SHAPES[0])
    for op in ("l2norm", "norm"):
        _, findings = run_chain(case, **{op: nudged(op, emulated(op))})
        first = first_departing(findings)
        assert first is not None
        assert first.op == op
