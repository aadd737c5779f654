"""The bound of every entry: beyond what rounding can do, and not before it."""

from __future__ import annotations

import pytest
import torch
from gdncheck.compare.ops.conv_bound import check_bound
from gdncheck.compare.ops.table import OPS
from gdncheck.compare.ops.trial import OpTrial
from gdncheck.kernels.contract import Clause, Contract
from gdncheck.kernels.interface import KernelInfo
from gdncheck.reference.emulation_ops import OpRounding
from generated import DTYPES, conv_inputs

CASTS = ({}, {"conv.product": "native"}, {"conv.pre": "native"})


def trial_of(inputs, output, casts):
    op = OPS["conv"]
    clauses = [
        Clause(id=f"cast.{point}", kind="rounding", applies_to=point, value=fmt, source="test")
        for point, fmt in (casts or {"conv.product": "fp32"}).items()
    ]
    info = KernelInfo(name="test", contract=Contract(kernel="test", clauses=tuple(clauses)))
    state = op.truth(inputs)["final_conv_state"]
    return OpTrial(op, inputs, info, {"conv_output": output, "final_conv_state": state})


@pytest.mark.parametrize("casts", CASTS, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_honest_rounding_is_beyond_the_bound(seed, casts):
    inputs = conv_inputs(seed)
    native = inputs.tensors["conv_input"].dtype
    for draw in (None, 1, 2):
        output = OPS["conv"].emulate(inputs, OpRounding(casts, native, None, draw))["conv_output"].to(native)
        outcome = check_bound(trial_of(inputs, output, casts))
        assert outcome.status == "ok", outcome.reason
        assert 0 < outcome.numbers["largest_share"] < 1.05


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_64_units_of_a_small_channel_are_within_the_bound(seed, dtype):
    """Channel 3 is a thousand times smaller than the others: its error is nothing beside their rounding."""
    inputs = conv_inputs(seed, dtype=dtype, bias=False)
    output = OPS["conv"].truth(inputs)["conv_output"].to(dtype)
    assert check_bound(trial_of(inputs, output, {})).status == "ok"
    row = int(output[:, 3].abs().argmax())
    output[row, 3] *= 1 + 64 * float(torch.finfo(dtype).eps)
    outcome = check_bound(trial_of(inputs, output, {}))
    assert outcome.status == "fires"
    assert "channel 3" in outcome.reason


@pytest.mark.parametrize(("total", "status"), [(-88.0, "ok"), (-80.0, "fires")])
def test_a_division_that_gives_zero_far_below_is_blamed(total, status):
    """At -88 1 + exp(88) is beyond 2^126, where a fast division gives 0; at -80 nothing excuses it."""
    inputs = conv_inputs(1, dtype=torch.float32, bias=True, state=False)
    t = inputs.tensors
    inputs = inputs.changed(
        conv_input=torch.zeros_like(t["conv_input"]), conv_bias=torch.full_like(t["conv_bias"], total)
    )
    assert check_bound(trial_of(inputs, torch.zeros_like(t["conv_input"]), {})).status == status
