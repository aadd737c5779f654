"""Companions are made once for all kernels of a shape, and never mixed up."""

from __future__ import annotations

import torch
from gdncheck.capture.make import make
from gdncheck.compare.checks.companion import Twins, plans
from gdncheck.compare.witness import Witness

SHAPE = {"k_heads": 1, "v_heads": 2, "dims": (8, 4), "dtype": "bf16"}


def test_two_kernels_of_a_case_get_the_same_companions():
    first, second = (Witness(make("qwen", lengths=[9, 3], seed=seed, **SHAPE)) for seed in (1, 2))
    assert all(
        a is b for a, b in zip(plans(first, seed=0).values(), plans(second, seed=0).values(), strict=True)
    )


def test_another_shape_seed_or_state_is_another_companion():
    base = make("qwen", lengths=[9, 3], **SHAPE)
    others = [
        (make("qwen", lengths=[9, 4], **SHAPE), 0),
        (base, 1),
        (make("qwen", lengths=[9, 3], state="random", **SHAPE), 0),
        (make("qwen", lengths=[9, 3], **{**SHAPE, "dtype": "fp16"}), 0),
    ]
    own = plans(Witness(base), seed=0)
    for case, seed in others:
        assert all(twin is not own[name] for name, twin in plans(Witness(case), seed=seed).items())


def test_what_is_kept_is_bounded_and_made_anew_the_same():
    twins = Twins(bytes_kept=4000, witnesses_kept=2)
    first = twins.made("exact", lengths=(30,), seed=0, **SHAPE)
    for seed in range(1, 6):
        twins.made("exact", lengths=(30,), seed=seed, **SHAPE)
    again = twins.made("exact", lengths=(30,), seed=0, **SHAPE)
    assert again is not first
    assert torch.equal(again["v"], first["v"])
    for seed in range(5):
        twins.witness(twins.made("exact", lengths=(30,), seed=seed, **SHAPE), torch.device("cpu"))
    assert len(twins._witnesses) == 2
