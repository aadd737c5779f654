"""The real Triton kernel in the interpreter: all axes that apply, and no false alarm."""

from __future__ import annotations

import pytest
from gdncheck.compare.sweep.sweep import sweep


@pytest.mark.slow
def test_a_sound_triton_kernel_fails_in_some_configuration(small_case):
    pytest.importorskip("fla", reason="the kernel under test")
    case = small_case(lengths=[70], k_heads=2, v_heads=4, dims=(32, 32), state="none", qk="raw")
    report = sweep(case, kernels=["fla.chunk"], device="cpu", budget=500.0)
    (found,) = report.sweeps
    assert [(a.deviations, a.reason) for a in found.attempts if a.failed] == []
    passed = {name for a in found.attempts if a.verdict == "pass" for name in a.deviations}
    assert passed >= {
        "chunk_size",
        "split",
        "packing",
        "state",
        "state_dtype",
        "l2norm",
        "autotune",
        "memory",
    }
