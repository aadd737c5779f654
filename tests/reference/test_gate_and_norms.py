"""Gate, l2norm and gated RMSNorm in float64 against arbitrary precision, and at their edges."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from gdncheck.reference.gate import gate, sigmoid, silu, softplus
from gdncheck.reference.l2norm import l2norm
from gdncheck.reference.norm import gated_rms_norm
from hypothesis import given, settings
from hypothesis import strategies as st

reals = st.floats(-800, 800, allow_nan=False) | st.floats(-1e-3, 1e-3) | st.floats(15, 40)


def double(x):
    return torch.tensor(x, dtype=torch.float64)


def close(got, expected, tolerance=4e-16):
    return abs(float(got) - float(expected)) <= tolerance * abs(float(expected)) + 5e-324


@settings(max_examples=300, deadline=None)
@given(x=reals)
def test_softplus_or_sigmoid_departs_from_its_definition(x):
    with mpmath.workdps(400):
        exact_softplus = mpmath.log1p(mpmath.exp(x))
        exact_sigmoid = 1 / (1 + mpmath.exp(-mpmath.mpf(x)))
        assert close(softplus(double(x)), exact_softplus)
        assert close(sigmoid(double(x)), exact_sigmoid)
        if x > -700:  # below, the sigmoid is subnormal and has few digits
            assert close(silu(double(x)), x * exact_sigmoid, 1e-15)


def test_a_limit_of_the_gate_is_not_reached():
    inf = math.inf
    assert softplus(double([-inf, inf])).tolist() == [0.0, inf]
    assert sigmoid(double([-inf, inf])).tolist() == [0.0, 1.0]
    assert 0 < float(sigmoid(double(-744.0))) < 1e-320
    assert softplus(double(math.nan)).isnan()
    assert sigmoid(double(math.nan)).isnan()
    g, beta = gate(
        double([[inf, -inf, 3.0]]), double([[inf, -inf, 0.0]]), double([0.0] * 3), double([1.0] * 3)
    )
    assert g.tolist()[0][0] == -inf
    assert g.tolist()[0][1] == 0.0
    assert beta.tolist() == [[1.0, 0.0, 0.5]]


def test_the_gate_is_not_the_models_formula():
    make = torch.Generator().manual_seed(0)
    a, b = (torch.randn(20, 3, generator=make, dtype=torch.float64) for _ in range(2))
    A_log, dt_bias = (torch.randn(3, generator=make, dtype=torch.float64) for _ in range(2))
    g, beta = gate(a, b, A_log, dt_bias)
    assert torch.allclose(g, -A_log.exp() * (1 + (a + dt_bias).exp()).log(), rtol=1e-13, atol=0)
    assert torch.allclose(beta, 1 / (1 + (-b).exp()), rtol=1e-14, atol=0)
    narrow = gate(a.bfloat16(), b.bfloat16(), A_log.float(), dt_bias.float())
    wide = gate(
        a.bfloat16().double(), b.bfloat16().double(), A_log.float().double(), dt_bias.float().double()
    )
    assert all(torch.equal(x, y) for x, y in zip(narrow, wide, strict=True))


@settings(max_examples=200, deadline=None)
@given(
    row=st.lists(st.floats(-1e3, 1e3, allow_subnormal=False), min_size=1, max_size=6),
    power=st.integers(-1000, 1000),
    eps=st.sampled_from([0.0, 1e-12, 1e-6, 1e-5]),
)
def test_a_row_of_any_size_loses_its_direction(row, power, eps):
    x = torch.ldexp(double(row), torch.tensor(power))
    if not x.isfinite().all() or not x.any():
        return
    weight = double([1.0 + i for i in range(len(row))])
    got, normed = l2norm(x, eps), gated_rms_norm(x, None, weight, eps)
    with mpmath.workdps(50):
        exact = [mpmath.mpf(value) for value in x.tolist()]
        squares = mpmath.fsum(value**2 for value in exact)
        root, mean_root = mpmath.sqrt(squares + eps), mpmath.sqrt(squares / len(exact) + eps)
        for i, value in enumerate(exact):
            if abs(value) > 1e-290:
                assert close(got[i], value / root, 2e-15)
                assert close(normed[i], (i + 1) * value / mean_root, 2e-15)


def test_a_special_row_spoils_another_row_or_is_hidden():
    x = double([[1.0, 2.0], [math.nan, 1.0], [math.inf, 1.0], [0.0, 0.0], [1e300, 1e300]])
    y = l2norm(x)
    assert torch.allclose(y[0], x[0] / (5 + 1e-6) ** 0.5, rtol=1e-15)
    assert y[1].isnan().all()
    assert y[2, 0].isnan()
    assert y[2, 1] == 0
    assert y[3].tolist() == [0.0, 0.0]
    assert torch.allclose(y[4], double(0.5**0.5).expand(2), rtol=1e-15)
    assert l2norm(x[:0]).shape == (0, 2)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_weight_or_gate_of_the_norm_acts_in_another_order(eps):
    # The gate comes after the norm: a gated x normalised afterwards would have unit mean square.
    make = torch.Generator().manual_seed(1)
    x, z = (torch.randn(7, 3, 16, generator=make, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(16, generator=make, dtype=torch.float64)
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight * (z / (1 + (-z).exp()))
    assert torch.allclose(gated_rms_norm(x, z, weight, eps), expected, rtol=1e-13, atol=1e-15)
