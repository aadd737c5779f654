"""Honest variants: as far from each other as sound kernels are, and no further."""

import dataclasses

import pytest
import torch
from gdncheck.reference.emulation import emulate_chunk
from gdncheck.reference.emulation_recurrent import emulate_recurrent
from gdncheck.reference.precision import PROFILES, Precision
from gdncheck.reference.truth import truth
from gdncheck.reference.variants import honest_variants


def make(tokens, hv=2, dk=64, dv=64, dtype=torch.bfloat16, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    q, k = (torch.nn.functional.normalize(normal(tokens, hv, dk), dim=-1).to(dtype) for _ in "qk")
    g = -0.2 * torch.rand(tokens, hv, generator=draw)
    return q, k, normal(tokens, hv, dv).to(dtype), g, torch.sigmoid(normal(tokens, hv))


def tile_rms(x, y, size=64):
    """RMS error per (chunk, head) of full chunks."""
    error = (x.double() - y).square()
    whole = error[: error.shape[0] // size * size]
    return whole.view(-1, size, *whole.shape[1:]).mean((1, 3)).sqrt()


def test_there_are_eight_and_they_are_seeded_and_distinct():
    variants = honest_variants()
    assert len(variants) == 8
    assert len({dataclasses.replace(v, name="", seed=0) for v in variants}) == 8
    assert variants == honest_variants(8, 0)
    assert variants != honest_variants(8, 1)
    assert {v.kind for v in variants} == {"ulp", "order", "both"}
    assert honest_variants(0) == []
    assert len({(v.seed, v.name) for v in honest_variants(20)}) == 20
    assert [v.kind for v in honest_variants(0, chunk_sizes=(16, 32))] == ["chunk-size", "chunk-size"]
    with pytest.raises(ValueError, match="n >= 0, not -1"):
        honest_variants(-1)


def test_every_variant_moves_bits_and_repeats_its_own():
    inputs = make(130, dtype=torch.float32)
    plain = emulate_chunk(*inputs, precision=Precision("float32"))
    seen = [plain.output]
    for variant in honest_variants():
        once, again = (
            emulate_chunk(*inputs, precision=Precision("float32"), variant=variant) for _ in range(2)
        )
        assert torch.equal(once.output, again.output), variant.name
        assert not any(torch.equal(once.output, other) for other in seen), variant.name
        seen.append(once.output)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_variants_err_like_each_other_in_half_precision(dtype):
    # numerics.md, tier 3: RMS ratio of honest variants p99 <= 1.05 per tile.
    ratios = []
    for seed in range(2):
        inputs = make(192, dtype=dtype, seed=seed)
        true, _ = truth(*inputs)
        plain = tile_rms(emulate_chunk(*inputs, precision="fla-0.4").output, true)
        for variant in honest_variants(8, seed):
            got = emulate_chunk(*inputs, precision="fla-0.4", variant=variant)
            ratios.append((tile_rms(got.output, true) / plain).flatten())
    ratios = torch.cat(ratios)
    assert ratios.quantile(0.99) < 1.05
    assert ratios.min() > 0.9
    assert ratios.max() > 1.0


def test_variants_stay_within_a_few_roundings_in_float32():
    # Here the order of sums is the whole error, so tiles differ more: 0.8 to 1.9 measured.
    inputs = make(192, dtype=torch.float32)
    true, _ = truth(*inputs)
    plain = tile_rms(emulate_chunk(*inputs, precision="fla-0.4").output, true)
    for variant in honest_variants():
        ratio = tile_rms(emulate_chunk(*inputs, precision="fla-0.4", variant=variant).output, true) / plain
        assert ratio.max() < 3, variant.name
        assert ratio.min() > 0.3, variant.name


def test_another_chunk_size_is_sound_but_of_its_own_class():
    inputs = make(192)
    true, _ = truth(*inputs)
    plain = tile_rms(emulate_chunk(*inputs, precision="fla-0.4").output, true)
    for variant in honest_variants(0, chunk_sizes=(16, 32, 128)):
        ratio = tile_rms(emulate_chunk(*inputs, precision="fla-0.4", variant=variant).output, true) / plain
        assert 0.7 < ratio.min() <= ratio.max() < 1.36, variant.name


def test_variants_never_round_stochastically():
    inputs = make(100)
    for variant in honest_variants():
        draws = [
            emulate_chunk(
                *inputs, precision="fla-0.4", variant=variant, generator=torch.Generator().manual_seed(s)
            )
            for s in (1, 2)
        ]
        assert torch.equal(draws[0].output, draws[1].output), variant.name


def test_variants_of_the_recurrent_kernel_are_float32_variants():
    inputs = make(60)
    _, state = truth(*inputs)
    plain = emulate_recurrent(*inputs, precision=PROFILES["fla-recurrent"])
    moved = 0
    for variant in honest_variants():
        got = emulate_recurrent(*inputs, variant=variant)
        assert ((got.final_state.double() - state).norm() / state.norm()) < 1e-6, variant.name
        moved += not torch.equal(got.final_state, plain.final_state)
    assert moved >= 6
