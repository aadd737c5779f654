"""transformers' own torch code through its adapter: never a kernel that its name may be bound to."""

from __future__ import annotations

import pytest
import torch
from gdncheck.kernels.interface import KernelCall, RunOptions
from gdncheck.kernels.pool import WorkerPool
from gdncheck.reference.truth import truth

OPS = ("chunk", "recurrent")


def tensors(lengths=(5, 0, 70), HK=2, HV=4, K=32, V=16, dtype=torch.float32, seed=0, unit=True):
    generator = torch.Generator().manual_seed(seed)
    T = sum(lengths)
    q, k = torch.randn(2, T, HK, K, generator=generator)
    if unit:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    return {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": torch.randn(T, HV, V, generator=generator).to(dtype),
        "g": -torch.rand(T, HV, generator=generator),
        "beta": torch.rand(T, HV, generator=generator),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
        "initial_state": torch.randn(len(lengths), HV, K, V, generator=generator),
    }


def error(found, wanted):
    return ((found.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()).item()


def true(t, l2norm=False):
    return truth(
        t["q"], t["k"], t["v"], t["g"], t["beta"], l2norm=l2norm,
        initial_state=t["initial_state"], cu_seqlens=t["cu_seqlens"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def kernels():
    with WorkerPool(device="cpu", time_limit=240) as pool:
        yield dict(zip(OPS, pool.open_all([f"transformers.{op}" for op in OPS]), strict=True))


def run(kernel, t, **options):
    (result,) = kernel.run([KernelCall(tensors=t, options=RunOptions(**options))])
    return result


@pytest.mark.parametrize("op", OPS)
def test_function_agrees_with_float64_over_packed_sequences_one_of_them_empty(kernels, op):
    t = tensors()
    result = run(kernels[op], t)
    assert result.status == "ok", result.message
    output, state = true(t)
    assert error(result.outputs["output"], output) < 2e-6
    assert error(result.outputs["final_state"], state) < 2e-6
    assert torch.equal(result.outputs["final_state"][1], t["initial_state"][1])
    assert result.evidence["calls"] == 2
    assert result.evidence["packing"] == "one call per sequence"


@pytest.mark.parametrize("op", OPS)
def test_the_function_that_runs_is_transformers_own_and_not_flas(kernels, op):
    info = kernels[op].info
    assert info.environment["backend"] == "torch"
    assert info.environment["function"].startswith("transformers.models.")
    # fla's chunk kernel rounds to the input type inside; torch's code computes in float32.
    t = tensors((40,), dtype=torch.bfloat16)
    state = true(t)[1]
    assert error(run(kernels[op], t).outputs["final_state"], state) < 2e-6


@pytest.mark.parametrize("op", OPS)
def test_raw_keys_are_normalised_in_the_function_or_before_it(kernels, op):
    t = tensors((9,), unit=False)
    wanted = true(t, l2norm=True)
    for l2norm in (None, "in_kernel", "before"):
        found = run(kernels[op], t, qk="raw", l2norm=l2norm).outputs
        assert error(found["output"], wanted[0]) < 2e-6
        assert error(found["final_state"], wanted[1]) < 2e-6


def test_chunk_size_is_obeyed_and_scale_only_by_powers_of_two(kernels):
    t = tensors((40,), K=16)
    plain = run(kernels["chunk"], t).outputs
    small = run(kernels["chunk"], t, chunk_size=16).outputs
    assert not torch.equal(plain["final_state"], small["final_state"])
    assert error(small["final_state"], plain["final_state"].double()) < 2e-6
    assert torch.equal(run(kernels["chunk"], t, scale=1.0).outputs["output"], plain["output"] * 4)
    for options, words in (
        ({"scale": 0.3}, "scale 0.3"),
        ({"chunk_size": 48}, "chunk size 48"),
        ({"state_dtype": "float64"}, "state dtype float64"),
    ):
        refused = run(kernels["chunk"], t, **options)
        assert refused.status == "refused"
        assert words in refused.message
    assert run(kernels["recurrent"], t, chunk_size=16).status == "refused"
    channel = {**t, "g": torch.zeros(40, 4, 16)}
    assert "per key channel" in run(kernels["chunk"], channel).message


def test_no_sequence_and_no_token_give_empty_outputs(kernels):
    t = tensors((0, 0))
    result = run(kernels["chunk"], t)
    assert result.outputs["output"].shape == (0, 4, 16)
    assert torch.equal(result.outputs["final_state"], t["initial_state"])
