"""Sound kernels pass: every dtype, packing and state that the rule allows, whatever algorithm they use."""

from __future__ import annotations

import random

import pytest
from gdncheck.reference.variants import honest_variants

SHAPES = {
    "one sequence": {"lengths": [200], "state": "none"},
    "grouped heads, packed, states": {"lengths": [70, 1, 64], "k_heads": 2, "v_heads": 4, "dims": (64, 32)},
    "empty and one-token sequences": {"lengths": [0, 1, 2, 0, 65, 0], "v_heads": 3},
    "one token": {"lengths": [1], "state": "none"},
    "only empty sequences": {"lengths": [0, 0]},
    "fresh beside continued": {"lengths": [33, 40, 5], "state": ["random", "stale", "zeros"]},
}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sound_kernel_is_accused(shape, dtype, honest, case_of, verdict_on, as_rule):
    case = case_of(dtype=dtype, **SHAPES[shape])
    for kernel in (honest.chunk, honest.recurrent):
        result = verdict_on(kernel, case)
        assert result.verdict == "pass", result.ruling.reason
        assert result.ruling.first_nonfinite is None
        assert result.ruling.worst_tile is None


@pytest.mark.parametrize(
    "family", ["parallel-keys", "identical-keys", "tiny-decay", "no-decay", "mixed-decay", "exact"]
)
def test_a_sound_kernel_is_accused_on_a_hard_family(family, honest, case_of, verdict_on, as_rule):
    for seed in range(2):
        case = case_of(
            family, seed=seed, lengths=[130, 17], dtype=random.Random(seed).choice(["bf16", "fp32"])
        )
        for kernel in (honest.chunk, honest.recurrent):
            result = verdict_on(kernel, case)
            assert result.verdict == "pass", result.ruling.reason


@pytest.mark.parametrize("chunk_size", [16, 32, 128])
def test_a_sound_kernel_of_an_undeclared_chunk_size_is_accused(
    chunk_size, honest, case_of, verdict_on, as_rule
):
    def kernel(*tensors, **options):
        return honest.chunk(*tensors, chunk_size=chunk_size, **options)

    for family, dtype in (("parallel-keys", "bf16"), ("qwen", "fp32")):
        result = verdict_on(as_rule(kernel), case_of(family, dtype=dtype))
        assert result.verdict == "pass", result.ruling.reason


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_a_sound_variant_is_accused_on_a_random_case(seed, honest, case_of, verdict_on, as_rule):
    dice = random.Random(seed)
    heads = dice.choice([1, 2])
    case = case_of(
        dice.choice(
            ["qwen", "gaussian", "parallel-keys", "tiny-decay", "no-decay", "mixed-decay", "beta-zero"]
        ),
        lengths=[dice.choice([0, 1, 15, 64, 65, dice.randint(1, 300)]) for _ in range(dice.randint(1, 4))],
        k_heads=heads,
        v_heads=heads * dice.choice([1, 2, 4]),
        dims=(dice.choice([32, 64]), dice.choice([32, 128])),
        dtype=dice.choice(["bf16", "fp16", "fp32"]),
        state=dice.choice(["none", "random"]),
        seed=seed,
    )
    variant = dice.choice(honest_variants(8, seed=1000 + seed))
    kernel = as_rule(lambda *t, **o: honest.chunk(*t, variant=variant, chunk_size=dice.choice([32, 64]), **o))
    assert verdict_on(kernel, case, relations="none").verdict == "pass"
