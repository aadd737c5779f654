"""Triton's interpreter with our shims computes what torch computes; without them it is shown to be wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gdncheck.kernels.interpreter import bfloat16, loops, scalars
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

SCRIPT = Path(__file__).parent / "interpreted" / "small_kernels.py"
LIMIT = 240


def bits_to_float32(bits):
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def float32_edges():
    """float32 values where rounding to bfloat16 can go wrong, each with its neighbours and both signs."""
    generator = torch.Generator().manual_seed(5)
    anchors = [
        0x00000000, 0x00000001, 0x00008000, 0x00018000, 0x007FFFFF, 0x00800000,  # subnormals, ties among them
        0x3F800000, 0x3F808000, 0x3F818000, 0x3F80FFFF, 0x3F7F8000,  # ties both ways, carry to the exponent
        0x477FE000, 0x477FF000, 0x33000000, 0x38800000,  # float16's overflow, underflow and smallest normal
        0x7F7F0000, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000,  # largest bfloat16, overflow by rounding, infinity
    ]  # fmt: skip
    near = [a + d for a in anchors for d in (-1, 0, 1) if 0 <= a + d <= 0x7F800000]
    random = torch.randint(0, 0x7F800000, (4000,), generator=generator).tolist()
    both = [sign | value for value in near + random for sign in (0, 0x80000000)]
    return bits_to_float32([*both, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF])


def make_inputs():
    generator = torch.Generator().manual_seed(7)
    all_bf16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    edges = float32_edges()
    pick = lambda: all_bf16[torch.randint(0, 65536, (6000,), generator=generator)]  # noqa: E731
    usual = lambda: torch.randn(2000, generator=generator).bfloat16()  # noqa: E731
    return {
        "all_bf16": all_bf16.clone(),
        "edges_f32": edges,
        "edges_f16": torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).clone(),
        "edges_f64": torch.cat([edges.double(), torch.tensor([1e300, -1e-300, 2.0**-140])]),
        "numbers_i32": torch.tensor(
            [0, 1, -1, 255, 256, 257, 65535, 2**24 + 1, 2**31 - 1, -(2**31)], dtype=torch.int32
        ),
        "small_bf16": torch.linspace(-300, 300, 777).bfloat16(),
        "moderate": torch.linspace(-20, 20, 4001).bfloat16(),
        "a": torch.cat([pick(), usual()]),
        "b": torch.cat([pick(), usual()]),
        "x": torch.randn(32, 64, generator=generator).bfloat16(),
        "y": torch.randn(64, 16, generator=generator).bfloat16(),
        "acc": torch.randn(32, 16, generator=generator),
    }


def run_kernels(mode, directory):
    inputs, out = make_inputs(), directory / f"{mode}.safetensors"
    save_file(inputs, directory / "in.safetensors")
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), mode, str(directory / "in.safetensors"), str(out)],
        capture_output=True, text=True, timeout=LIMIT, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    with safe_open(out, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return inputs, found, dict(file.metadata() or {})


@pytest.fixture(scope="module")
def mended(tmp_path_factory):
    inputs, found, errors = run_kernels("mended", tmp_path_factory.mktemp("mended"))
    assert not errors, errors
    return inputs, found


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return run_kernels("stock", tmp_path_factory.mktemp("stock"))


def n_different(found, wanted):
    """Entries that differ: in bits, or in being NaN (a NaN's payload is nobody's promise)."""
    assert found.dtype == wanted.dtype
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.dtype.itemsize]
    same = found.view(integer) == wanted.view(integer)
    if found.is_floating_point():
        same |= found.isnan() & wanted.isnan()
    return int((~same).sum())


CASTS = [
    ("all_bf16.f32", "all_bf16", torch.float32),
    ("all_bf16.f16", "all_bf16", torch.float16),
    ("all_bf16.f64", "all_bf16", torch.float64),
    ("edges_f32.bf16", "edges_f32", torch.bfloat16),
    ("edges_f16.bf16", "edges_f16", torch.bfloat16),
    ("edges_f64.bf16", "edges_f64", torch.bfloat16),
    ("numbers_i32.bf16", "numbers_i32", torch.bfloat16),
    ("small.i32", "small_bf16", torch.int32),
    ("rtne", "edges_f32", torch.bfloat16),
    ("rtne_f16", "edges_f32", torch.float16),
]


@pytest.mark.parametrize(("name", "source", "dtype"), CASTS)
def test_cast_has_the_bits_of_torchs(mended, name, source, dtype):
    inputs, found = mended
    assert n_different(found[name], inputs[source].to(dtype)) == 0


def test_widening_all_bfloat16_keeps_nan_payloads_too(mended):
    inputs, found = mended
    assert torch.equal(found["all_bf16.f32"].view(torch.int32), inputs["all_bf16"].float().view(torch.int32))


def test_cast_toward_zero_cuts_off(mended):
    inputs, found = mended
    x = inputs["edges_f32"]
    wanted = (x.view(torch.int32) & -65536).view(torch.float32).bfloat16()
    wanted[x.isnan()] = float("nan")
    assert n_different(found["rtz"], wanted) == 0


def by_torch(name, a, b):
    wide = a.float(), b.float()
    return {
        "add": lambda: a + b,
        "sub": lambda: a - b,
        "mul": lambda: a * b,
        "div": lambda: a / b,
        "smaller": lambda: torch.where(a < b, a, b),
        "chosen": lambda: torch.where((a >= b) & (a != 0), a, 0 - b),
        "scaled": lambda: a * 2.5 + 1,
        "fma": lambda: (wide[0] * wide[1] + wide[0]).bfloat16(),
        "abs": lambda: a.abs(),
        "neg": lambda: 0 - a,
        "floor": lambda: a.floor(),
    }[name]()


ARITHMETIC = ("add", "sub", "mul", "div", "smaller", "chosen", "scaled", "fma", "abs", "neg", "floor")


@pytest.mark.parametrize("name", ARITHMETIC)
def test_bfloat16_arithmetic_has_the_bits_of_torchs(mended, name):
    inputs, found = mended
    assert n_different(found[name], by_torch(name, inputs["a"], inputs["b"])) == 0


def test_dot_of_bfloat16_is_a_float32_product(mended):
    inputs, found = mended
    x, y, acc = (inputs[name].double() for name in ("x", "y", "acc"))
    bound = 64 * 2.0**-24 * (x.abs() @ y.abs() + acc.abs())
    assert bool(((found["dot"].double() - (x @ y + acc)).abs() <= bound).all())


def test_sums_of_bfloat16_are_taken_in_float32_and_rounded_once(mended):
    inputs, found = mended
    x = inputs["x"].double()
    wanted = {"sum": x.sum(1), "bare_sum": x.sum(1), "cumsum": x.cumsum(1)}
    terms = {"sum": x.abs().sum(1), "bare_sum": x.abs().sum(1), "cumsum": x.abs().cumsum(1)}
    for name, value in wanted.items():
        bound = 64 * 2.0**-24 * terms[name] + value.abs() * 2.0**-8
        assert bool(((found[name].double() - value).abs() <= bound).all()), name
    assert torch.equal(found["max"].double(), x.amax(1))


def test_builtin_bound_at_import_is_found_in_a_kernel(mended):
    inputs, found = mended
    wanted = inputs["moderate"].double().exp()
    assert bool(((found["exp"].double() - wanted).abs() <= 2.0**-8 * wanted).all())


def test_loop_variable_can_be_cast(mended):
    assert mended[1]["loop"].item() == 2 * (0 + 1 + 2 + 3 + 4)


def test_autotuner_takes_the_largest_blocks_or_the_pin_or_says_that_no_configuration_matches(mended):
    found = mended[1]
    assert set(found["tuned"].tolist()) == {64}
    assert set(found["pinned"].tolist()) == {16}
    said = bytes(found["bad_pin"].tolist()).decode()
    assert "{'BLOCK': 32}" in said
    assert "tuned" in said
    assert "BLOCK=16" in said


@pytest.mark.parametrize("name", ["filled", "enlarged", "replaced"])
def test_a_grid_function_that_fills_a_tensor_argument_is_heeded(mended, name):
    assert mended[1][name].tolist() == [7.0, 3.0, 9.0, 0.0, 5.0]


def test_stock_interpreter_truncates_casts_and_multiplies_raw_bits(stock):
    inputs, found, _ = stock
    finite = inputs["edges_f32"].isfinite()
    assert n_different(found["edges_f32.bf16"][finite], inputs["edges_f32"].bfloat16()[finite]) > 1000


def test_stock_interpreter_fails_or_errs_where_a_shim_is_needed(stock):
    inputs, found, errors = stock
    # The experiments stop at the first exception, so each is either absent, or wrong.
    for name in ("add", "mul"):
        if name in found:
            assert n_different(found[name], by_torch(name, inputs["a"], inputs["b"])) > 1000
    assert "add" in found or "arithmetic" in errors
    if "dot" in found:
        wanted = inputs["x"].float() @ inputs["y"].float() + inputs["acc"]
        assert not torch.allclose(found["dot"], wanted, rtol=0.1, atol=1.0)
    else:
        assert "dots" in errors
    assert "has no attribute 'to'" in errors["loops"]
    assert "_semantic" in errors["bound"] or "_builder" in errors["bound"]
    assert "active drivers" in errors["tune"]
    assert "device" in errors["device"]
    assert "has no attribute" in errors["grids"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_any_float32_bits_round_as_torch_rounds(bits):
    x = bits_to_float32(bits)
    found = torch.from_numpy(bfloat16.from_float32(x.numpy()).view(np.int16)).view(torch.bfloat16)
    assert n_different(found, x.bfloat16()) == 0


@pytest.mark.parametrize("shape", [(), (1,), (3, 0), (2, 3, 4)])
def test_conversion_keeps_shape_and_strided_views(shape):
    x = torch.randn(shape).bfloat16().float().numpy()
    bits = bfloat16.from_float32(x)
    assert bits.shape == shape
    back = bfloat16.to_float32(bits.T)
    assert back.shape == x.T.shape
    assert np.array_equal(back, x.T)


class StrictArray(np.ndarray):
    """Refuses int() and bool() of arrays with dimensions, as numpy 2.4 does for int()."""

    def __int__(self):
        if self.ndim:
            raise TypeError("only 0-dimensional arrays can be converted to Python scalars")
        return super().__int__()


class Scalar:
    """Stands for a tensor of the interpreter."""

    def __init__(self, values):
        self.handle = type("Handle", (), {"data": np.asarray(values).view(StrictArray)})()


def test_scalar_becomes_an_index_with_a_numpy_that_makes_no_int_of_arrays():
    with pytest.raises(TypeError, match="0-dimensional"):
        int(Scalar([7]).handle.data)
    assert scalars.as_index(Scalar([7])) == 7
    assert scalars.as_index(Scalar(7)) == 7
    assert scalars.as_bool(Scalar([0])) is False
    assert scalars.as_bool(Scalar([[3]])) is True
    assert scalars.as_bool(Scalar([0, 0])) is True
    with pytest.raises(TypeError, match="shape"):
        scalars.as_index(Scalar([1, 2]))


def casting_loop(n):
    for i in range(n):
        i.to(int)


def plain_loop(n, x):
    for i in range(n):
        x.to(i)


def test_only_functions_that_cast_their_loop_variable_get_tensor_loops():
    assert loops.casts_a_loop_variable(casting_loop)
    assert not loops.casts_a_loop_variable(plain_loop)
    made = {}
    exec("def f(n):\n    for i in range(n):\n        i.to(int)", made)
    assert loops.casts_a_loop_variable(made["f"])


def test_range_given_to_a_module_stays_pythons_outside_kernels():
    import types

    fake = types.SimpleNamespace(tl=None, TensorHandle=None)
    assert loops.KernelRange(fake, lambda: False)(2, 5) == range(2, 5)


def test_asking_for_the_interpreter_after_a_compiled_import_is_refused_in_one_line():
    code = (
        "import os; os.environ.pop('TRITON_INTERPRET', None); import triton, triton.language\n"
        "from gdncheck.kernels import interpreter\n"
        "try: interpreter.install()\n"
        "except Exception as e: print(type(e).__name__, e)\n"
        "print(interpreter.describe())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT,
        env={**os.environ, "PYTHONSAFEPATH": "1"}, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("CannotRun triton was imported before its interpreter")
    assert "{'interpreted': False}" in done.stdout
