"""Small Triton kernels, run in a process of their own: `python small_kernels.py stock|mended IN OUT`.

IN and OUT are safetensors files. `stock` runs Triton's interpreter as it is, `mended` with gdncheck's
shims. An experiment that raises leaves its exception's text in OUT's metadata under its name.
"""

from __future__ import annotations

import os
import sys
import warnings

import torch
from safetensors.torch import load_file, save_file

MODE = sys.argv[1]
if MODE == "mended":
    from gdncheck.kernels import interpreter

    interpreter.install()
else:
    os.environ["TRITON_INTERPRET"] = "1"
    warnings.simplefilter("ignore")  # the stock interpreter overflows

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from gdncheck.kernels import autotune  # noqa: E402

bound_exp = tl.exp


@triton.jit
def cast(src, dst, N, BLOCK: tl.constexpr, MODE: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(src + o, mask=o < N, other=0)
    if MODE == 1:
        y = x.to(dst.dtype.element_ty, fp_downcast_rounding="rtz")
    elif MODE == 2:
        y = x.to(dst.dtype.element_ty, fp_downcast_rounding="rtne")
    else:
        y = x.to(dst.dtype.element_ty)
    tl.store(dst + o, y, mask=o < N)


@triton.jit
def binary(a, b, out, N, BLOCK: tl.constexpr, OP: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(a + o, mask=o < N)
    y = tl.load(b + o, mask=o < N)
    if OP == 0:
        z = x + y
    elif OP == 1:
        z = x - y
    elif OP == 2:
        z = x * y
    elif OP == 3:
        z = (x.to(tl.float32) / y.to(tl.float32)).to(tl.bfloat16)
    elif OP == 4:
        z = tl.where(x < y, x, y)
    elif OP == 5:
        z = tl.where((x >= y) & (x != 0), x, -y)
    elif OP == 6:
        z = x * 2.5 + 1
    else:
        z = tl.fma(x, y, x)
    tl.store(out + o, z, mask=o < N)


@triton.jit
def unary(a, out, N, BLOCK: tl.constexpr, OP: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(a + o, mask=o < N)
    if OP == 0:
        z = tl.abs(x)
    elif OP == 1:
        z = -x
    elif OP == 2:
        z = tl.floor(x.to(tl.float32)).to(tl.bfloat16)
    else:
        z = bound_exp(x.to(tl.float32)).to(tl.bfloat16)
    tl.store(out + o, z, mask=o < N)


@triton.jit
def dot(a, b, c, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    i, j, m = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + i[:, None] * K + m[None, :])
    y = tl.load(b + m[:, None] * N + j[None, :])
    z = tl.load(c + i[:, None] * N + j[None, :])
    tl.store(out + i[:, None] * N + j[None, :], tl.dot(x, y, acc=z))


@triton.jit
def reductions(a, sums, bare, largest, running, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(a + i[:, None] * N + j[None, :])
    tl.store(sums + i, tl.sum(x, 1))
    tl.store(bare + i, tl.reduce(x, 1, tl.standard._sum_combine))
    tl.store(largest + i, tl.max(x, 1))
    tl.store(running + i[:, None] * N + j[None, :], tl.cumsum(x, 1))


@triton.jit
def loop(out, n):
    total = tl.zeros([1], dtype=tl.int64)
    last = tl.load(n)
    for i in range(last):
        total += i.to(tl.int64) * 2
    tl.store(out + tl.arange(0, 1), total)


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}, num_warps=warps) for block in (16, 64) for warps in (1, 4)],
    key=["N"],
)
@triton.jit
def tuned(out, N, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, tl.zeros([BLOCK], dtype=tl.int32) + BLOCK, mask=o < N)


@triton.jit
def gather(src, numbers, out, N, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(numbers + o, mask=o < N, other=0)
    tl.store(out + o, tl.load(src + at, mask=o < N, other=0), mask=o < N)


def over(kernel, *tensors, n, **meta):
    kernel[(triton.cdiv(n, 1024),)](*tensors, n, BLOCK=1024, **meta)
    return tensors[-1]


DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "f64": torch.float64,
    "i32": torch.int32,
    "bf16": torch.bfloat16,
}


def casts(given):
    for name in ("all_bf16", "edges_f32", "edges_f16", "edges_f64", "numbers_i32"):
        x = given[name]
        targets = ("f32", "f16", "f64") if name == "all_bf16" else ("bf16",)
        for target in targets:
            yield (
                f"{name}.{target}",
                over(cast, x, torch.empty(len(x), dtype=DTYPES[target]), n=len(x), MODE=0),
            )
    x = given["edges_f32"]
    yield "rtz", over(cast, x, torch.empty(len(x), dtype=torch.bfloat16), n=len(x), MODE=1)
    yield "rtne", over(cast, x, torch.empty(len(x), dtype=torch.bfloat16), n=len(x), MODE=2)
    yield "rtne_f16", over(cast, x, torch.empty(len(x), dtype=torch.float16), n=len(x), MODE=2)
    small = given["small_bf16"]
    yield "small.i32", over(cast, small, torch.empty(len(small), dtype=torch.int32), n=len(small), MODE=0)


def arithmetic(given):
    a, b = given["a"], given["b"]
    for op, name in enumerate(("add", "sub", "mul", "div", "smaller", "chosen", "scaled", "fma")):
        yield name, over(binary, a, b, torch.empty_like(a), n=len(a), OP=op)
    for op, name in enumerate(("abs", "neg", "floor")):
        yield name, over(unary, a, torch.empty_like(a), n=len(a), OP=op)


def dots(given):
    x, y = given["x"], given["y"]
    (m, k), n = x.shape, y.shape[1]
    out = torch.empty_like(given["acc"])
    dot[(1,)](x, y, given["acc"], out, M=m, K=k, N=n)
    yield "dot", out


def sums(given):
    x = given["x"]
    m, n = x.shape
    outs = [torch.empty(m), torch.empty(m, dtype=x.dtype), torch.empty(m), torch.empty(m, n)]
    reductions[(1,)](x, *outs, M=m, N=n)
    yield from zip(("sum", "bare_sum", "max", "cumsum"), outs, strict=True)


def loops(given):
    out = torch.empty(1, dtype=torch.int64)
    loop[(1,)](out, torch.tensor([5]))
    yield "loop", out


def bound(given):
    a = given["moderate"]
    yield "exp", over(unary, a, torch.empty_like(a), n=len(a), OP=3)


def tune(given):
    out = torch.empty(100, dtype=torch.int32)
    grid = lambda meta: (triton.cdiv(100, meta["BLOCK"]),)  # noqa: E731
    tuned[grid](out, 100)
    yield "tuned", out.clone()
    with autotune.pinned({"tuned": {"BLOCK": 16, "num_warps": 4}}) as launched:
        tuned[grid](out, 100)
        assert launched == {"tuned": "BLOCK=16, num_warps=4, num_stages=3"}, launched
    yield "pinned", out.clone()
    with autotune.pinned({"tuned": {"BLOCK": 32}}):
        try:
            tuned[grid](out, 100)
        except autotune.Refused as error:
            yield "bad_pin", torch.tensor(list(str(error).encode()), dtype=torch.uint8)


def device(given):
    with torch.cpu.device(None):
        yield "device", torch.ones(1)


def grids(given):
    """The grid function fills the kernel's tensor of numbers: in its place, enlarged, or another one."""
    x, wanted = torch.arange(10.0), torch.tensor([7, 3, 9, 0, 5], dtype=torch.int32)

    def filled(meta):
        meta["numbers"].copy_(wanted)
        return (triton.cdiv(meta["N"], meta["BLOCK"]),)

    def enlarged(meta):
        meta["numbers"].resize_(4096).fill_(0)
        meta["numbers"][: len(wanted)].copy_(wanted)
        return (triton.cdiv(meta["N"], meta["BLOCK"]),)

    def replaced(meta):
        meta["numbers"] = wanted.clone()
        return (triton.cdiv(meta["N"], meta["BLOCK"]),)

    for grid in (filled, enlarged, replaced):
        out = torch.full((len(wanted),), -1.0)
        gather[grid](x, torch.zeros(len(wanted), dtype=torch.int32), out, len(wanted), BLOCK=4)
        yield grid.__name__, out


def main():
    given, found, errors = load_file(sys.argv[2]), {}, {}
    for experiment in (casts, arithmetic, dots, sums, loops, bound, tune, device, grids):
        try:
            for name, value in experiment(given):
                found[name] = value.contiguous()
        except Exception as error:
            errors[experiment.__name__] = f"{type(error).__name__}: {error}"
    save_file(found, sys.argv[3], metadata=errors)


main()
