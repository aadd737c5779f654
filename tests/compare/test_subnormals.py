"""Subnormal results: a float16 output whose entries are steps of 6e-8 is no fault of the kernel."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("seed", [75, 1, 2])
def test_a_sound_kernel_is_accused_of_what_float16_cannot_store(seed, honest, case_of, verdict_on):
    shape = {"k_heads": 2, "v_heads": 8, "dims": (64, 32), "dtype": "fp16", "seed": seed}
    case = case_of("beta-zero", lengths=[0, 128, 128, 0], **shape)
    for kernel in (honest.recurrent, honest.chunk):
        result = verdict_on(kernel, case, relations="none")
        assert result.verdict == "pass", result.ruling.reason


def test_a_fault_larger_than_the_steps_hides_among_them(honest, case_of, verdict_on, as_rule):
    def broken(*tensors, **options):
        output, state = honest.recurrent(*tensors, **options)
        output[200, 3] += 1e-4
        return output, state

    shape = {"k_heads": 2, "v_heads": 8, "dims": (64, 32), "dtype": "fp16", "seed": 75}
    case = case_of("beta-zero", lengths=[128, 128], **shape)
    result = verdict_on(as_rule(broken), case, relations="none")
    assert result.verdict == "fail"
    assert (result.ruling.worst_tile.sequence, result.ruling.worst_tile.token) == (1, 72)
