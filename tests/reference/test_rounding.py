"""Rounding: bit-exact against torch's casts, and sound in the modes that torch has no cast for."""

import itertools

import pytest
import torch
from gdncheck.reference.rounding import FORMATS, format_of, round_to


def every_half_pattern(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def same_bits(a, b):
    nan = torch.isnan(a) & torch.isnan(b)
    view = torch.int32 if a.dtype == torch.float32 else torch.int64
    return bool(((a.view(view) == b.view(view)) | nan).all())


def probes(dtype):
    """float32 values around every value of a 16-bit format: itself, its midpoints and their neighbours."""
    base = every_half_pattern(dtype).float()
    base = base[torch.isfinite(base)]
    ordered = base.unique()
    middle = ((ordered[1:].double() + ordered[:-1].double()) / 2).float()
    near = [middle, torch.nextafter(middle, middle + 1), torch.nextafter(middle, middle - 1)]
    edge = torch.tensor(
        [0.0, -0.0, 65519.0, 65520.0, 3.39e38, 3.4028235e38, 1e-45, 6e-8, 2.9e-8, torch.inf, -torch.inf]
    )
    random = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(1))
    return torch.cat([base, *near, edge, random.to(torch.int32).view(torch.float32)])


@pytest.mark.parametrize(("fmt", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_nearest_even_differs_from_the_cast_in_no_bit(fmt, dtype):
    patterns = every_half_pattern(dtype).float()
    assert same_bits(round_to(patterns, fmt), patterns), "a value of the format itself must not move"
    x = probes(dtype)
    assert same_bits(round_to(x, fmt), x.to(dtype).float())
    # The general path (through float64) must give the same bits as the cast.
    assert same_bits(round_to(x.double(), fmt).float(), x.to(dtype).float())


def test_tf32_modes_follow_their_definition():
    x = probes(torch.float16)
    x = x[torch.isfinite(x)]
    wide = x.double()
    for mode in ("nearest-even", "nearest-away", "toward-zero"):
        fast, slow = round_to(x, "tf32", mode), round_to(wide, "tf32", mode)
        assert same_bits(fast.double(), slow), mode
    up = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, -(1 + 2.0**-11)])
    step = 2.0**-10
    assert round_to(up, "tf32").tolist() == [1.0, 1 + 2 * step, -1.0]
    assert round_to(up, "tf32", "nearest-away").tolist() == [1 + step, 1 + 2 * step, -(1 + step)]
    assert round_to(up, "tf32", "toward-zero").tolist() == [1.0, 1 + step, -1.0]


@pytest.mark.parametrize(
    ("fmt", "mode"), list(itertools.product(["bf16", "fp16", "tf32"], ["nearest-even", "nearest-away"]))
)
def test_nearest_never_misses_the_nearest_value(fmt, mode):
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(2)) * 100
    error = (round_to(x, fmt, mode).double() - x.double()).abs()
    assert (error <= FORMATS[fmt].unit_roundoff * x.double().abs()).all()
    assert error.max() > 0


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "tf32"])
def test_toward_zero_never_grows_a_number(fmt):
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(3))
    rounded = round_to(x, fmt, "toward-zero")
    assert (rounded.abs() <= x.abs()).all()
    assert ((x - rounded).abs() <= 2 * FORMATS[fmt].unit_roundoff * x.abs()).all()
    assert not torch.equal(rounded, x)


def test_overflow_goes_where_each_mode_sends_it():
    x = torch.tensor([65519.996, 65520.0, 1e6, -1e6])
    assert round_to(x, "fp16").tolist() == [65504.0, torch.inf, torch.inf, -torch.inf]
    assert round_to(x, "fp16", "toward-zero").tolist() == [65504.0, 65504.0, 65504.0, -65504.0]
    huge = torch.tensor([3.4028235e38])
    assert round_to(huge, "bf16").item() == torch.inf
    assert round_to(huge, "bf16", "toward-zero").item() == FORMATS["bf16"].largest
    assert round_to(torch.tensor([1e300], dtype=torch.float64), "fp32").item() == torch.inf


@pytest.mark.parametrize("mode", ["nearest-even", "nearest-away", "toward-zero", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_and_infinity_survive_every_mode(mode, dtype):
    hidden = torch.tensor([0x7F800001, -0x7FFFFF, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # NaNs
    x = torch.cat([hidden, torch.tensor([torch.inf, -torch.inf, 0.0])]).to(dtype)
    for fmt in ("bf16", "fp16", "tf32", "fp32"):
        y = round_to(x, fmt, mode)
        assert torch.isnan(y[:3]).all()
        assert y[3:].tolist() == [torch.inf, -torch.inf, 0.0]


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "tf32"])
def test_stochastic_rounding_is_unbiased_and_seeded(fmt):
    value = torch.full((40_000,), 1 + FORMATS[fmt].unit_roundoff * 0.6)
    draw = lambda seed: round_to(value, fmt, "stochastic", torch.Generator().manual_seed(seed))  # noqa: E731
    assert torch.equal(draw(5), draw(5))
    assert not torch.equal(draw(5), draw(6))
    assert len(draw(5).unique()) == 2
    assert abs((draw(5).double() - value.double()).mean().item()) < 0.02 * FORMATS[fmt].unit_roundoff


def test_float64_is_rounded_once_where_the_cast_rounds_twice():
    # Just above the midpoint of two bf16 values by less than float32 can hold: up, not to even.
    x = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert round_to(x, "bf16").item() == 1 + 2.0**-7


def test_wider_formats_leave_the_tensor_alone():
    x = torch.randn(10)
    assert round_to(x, "fp32") is x
    assert round_to(x, "fp64") is x


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: round_to(torch.ones(1, dtype=torch.bfloat16), "fp16"), "float32 or float64"),
        (lambda: round_to(torch.ones(1), "fp8"), "unknown format 'fp8'"),
        (lambda: round_to(torch.ones(1), "bf16", "up"), "unknown rounding mode 'up'"),
        (lambda: format_of(torch.int8), "torch.int8"),
    ],
)
def test_a_wrong_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
