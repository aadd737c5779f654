"""Single operations: hostile inputs, contracts, guesses, and what a declared clause may excuse."""

from __future__ import annotations

import msgspec
import pytest
import torch
from gdncheck.capture.synthetic.core import make_core
from gdncheck.compare.ops.inputs import op_inputs
from gdncheck.compare.ops.session import diff_op
from gdncheck.compare.ops.table import OPS
from gdncheck.kernels.contract import Clause, Contract
from gdncheck.reference.emulation_ops import OpRounding, emulate_l2norm, emulate_norm
from gdncheck.reference.op_functions import L2Norm
from op_direct import Direct, emulated, function

SOURCE = "this test"


def inputs(op, family="core-qwen", dtype="bf16", seed=0, lengths=(40, 1, 23), **changed):
    case = make_core(family, lengths=list(lengths), dtype=dtype, seed=seed)
    return op_inputs(case.with_tensors(**changed) if changed else case, op)


def ruling(op, kernel, given, seed=0):
    return diff_op(kernel, OPS[op], given, seed=seed).ruling


def declaring(kernel: Direct, *clauses: tuple[str, str, object]) -> Direct:
    """The kernel with clauses (id, kind, value)."""
    contract = Contract(
        kernel="test",
        clauses=tuple(Clause(id=i, kind=k, applies_to="", value=v, source=SOURCE) for i, k, v in clauses),
    )
    kernel.info = msgspec.structs.replace(kernel.info, contract=contract)
    return kernel


def l2norm_eps(q, k):
    function = L2Norm(eps=1e-3)
    return tuple(emulate_l2norm(x, OpRounding(), function).to(x.dtype) for x in (q, k))


def l2norm_in_half(q, k):
    """Squares and their sum in the input's dtype: fp16 overflows above a norm of 256."""
    return tuple(x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))


def l2norm_nan_on_zero(q, k):
    return tuple(
        (x.float() / torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True)).to(x.dtype) for x in (q, k)
    )


def norm_in_half(core_output, z, norm_weight):
    at = OpRounding({"norm.normed": "native"}, z.dtype)
    return emulate_norm(core_output, z, norm_weight, at).to(z.dtype)


def test_an_undeclared_eps_is_called_wrong_and_not_a_hypothesis():
    found = ruling("l2norm", function("l2norm", l2norm_eps), inputs("l2norm", "core-quiet"))
    assert found.verdict == "suspect"
    assert "eps is 0.001" in found.reason


def test_a_declared_eps_is_no_named_contract_difference():
    kernel = declaring(function("l2norm", l2norm_eps), ("l2norm.eps", "transform", 1e-3))
    found = ruling("l2norm", kernel, inputs("l2norm", "core-quiet"))
    assert found.verdict == "pass", found.reason
    assert [d.clause for d in found.contract_differences] == ["l2norm.eps"]
    assert found.contract_differences[0].size > 0.1


def test_a_declared_eps_that_no_token_shows_is_named_a_difference():
    kernel = declaring(emulated("l2norm"), ("l2norm.eps", "transform", 2e-6))
    found = ruling("l2norm", kernel, inputs("l2norm", "core-large"))
    assert found.verdict == "pass"
    assert not found.contract_differences


def test_a_square_that_overflows_fp16_is_blamed_on_a_kernel_that_says_where_it_sums():
    large = {"q": torch.full((64, 2, 16), 200.0, dtype=torch.float16)}
    given = inputs("l2norm", dtype="fp16", **large)
    says = declaring(
        function("l2norm", l2norm_in_half),
        ("cast.l2norm.square", "rounding", "native"),
        ("cast.l2norm.sum", "rounding", "native"),
    )
    assert ruling("l2norm", says, given).verdict == "out-of-contract"
    silent = ruling("l2norm", function("l2norm", l2norm_in_half), given)
    assert silent.verdict == "fail"
    assert ruling("l2norm", emulated("l2norm"), given).verdict == "pass"


def test_a_zero_row_that_becomes_nan_passes():
    quiet = inputs("l2norm", q=torch.zeros(64, 2, 16, dtype=torch.bfloat16))
    found = ruling("l2norm", function("l2norm", l2norm_nan_on_zero), quiet)
    assert found.verdict == "fail"
    assert found.first_nonfinite is not None
    assert ruling("l2norm", emulated("l2norm"), quiet).verdict == "pass"


@pytest.mark.parametrize(
    ("value", "g"), [(-torch.inf, 0.0), (torch.inf, -torch.inf), (-1e4, 0.0), (1e4, None)]
)
def test_the_ends_of_the_gate_are_judged_by_size(value, g):
    case = make_core("core-qwen", lengths=[20], dtype="bf16")
    a = case["a"].clone()
    a[7, 1] = value
    answer = diff_op(emulated("gate"), OPS["gate"], op_inputs(case.with_tensors(a=a), "gate"))
    assert answer.ruling.verdict == "pass", answer.ruling.reason
    if g is not None:
        assert float(answer.outputs["g"][7, 1]) == g


def test_an_infinite_gate_that_a_kernel_makes_finite_passes():
    def clipped(a, b, A_log, dt_bias):
        x = (a.float() + dt_bias.float()).clamp(max=1e4)
        return -A_log.float().exp() * torch.nn.functional.softplus(x), b.sigmoid()

    case = make_core("core-qwen", lengths=[20], dtype="bf16")
    a = case["a"].clone()
    a[3, 0] = torch.inf
    found = ruling("gate", function("gate", clipped), op_inputs(case.with_tensors(a=a), "gate"))
    assert found.verdict == "fail"
    assert found.rule == "non-finite"


def test_bad_input_is_blamed_on_the_kernel():
    case = make_core("core-qwen", lengths=[20, 9], dtype="bf16")
    z = case["z"].clone()
    z[22, 1, 3] = torch.nan
    found = ruling("norm", emulated("norm"), op_inputs(case.with_tensors(z=z), "norm"))
    assert found.verdict == "out-of-contract"
    assert "sequence 1, token 2" in found.reason
    assert "does with it what the formula does" in found.reason


def test_bad_input_that_spreads_is_called_contained():
    def spreads(core_output, z, norm_weight):
        y = emulate_norm(core_output, z, norm_weight, OpRounding()).to(z.dtype)
        return torch.where(torch.isnan(z).any(), torch.nan, y.float()).to(z.dtype)

    case = make_core("core-qwen", lengths=[20], dtype="bf16")
    z = case["z"].clone()
    z[5, 1, 3] = torch.nan
    found = ruling("norm", function("norm", spreads), op_inputs(case.with_tensors(z=z), "norm"))
    assert found.verdict == "out-of-contract"
    assert "departs" in found.reason


def test_another_rounding_before_the_weight_is_accused_where_none_is_declared():
    assert ruling("norm", function("norm", norm_in_half), inputs("norm")).verdict == "pass"


def test_a_declared_single_rounding_excuses_a_second_one():
    given = inputs("norm", lengths=(300,))

    def crude(core_output, z, norm_weight):
        at = OpRounding({"norm.normed": "bf16", "norm.weighted": "bf16", "norm.silu": "bf16"}, z.dtype)
        return emulate_norm(core_output, z, norm_weight, at).to(z.dtype)

    once = ("rounding", "rounding", "float32, stored once")
    assert ruling("norm", declaring(function("norm", crude), once), given).verdict == "fail"
    assert ruling("norm", declaring(emulated("norm"), once), given).verdict == "pass"


def test_an_output_in_too_few_bits_passes():
    def narrow(a, b, A_log, dt_bias):
        g = -A_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias)
        return g.bfloat16(), b.sigmoid()

    found = ruling("gate", function("gate", narrow), inputs("gate"))
    assert found.verdict == "fail"
    assert "g is bfloat16" in found.reason


def test_a_kernel_that_moves_passes():
    count = [0]

    def moves(core_output, z, norm_weight):
        y = emulate_norm(core_output, z, norm_weight, OpRounding()).to(z.dtype)
        count[0] += 1
        y[0, 0, 0] *= 1 + 2.0**-7 * (count[0] % 2)
        return y

    found = ruling("norm", function("norm", moves), inputs("norm"))
    assert (found.verdict, found.rule) == ("fail", "run-to-run")
