"""The heads of one rank: a kernel whose heads depend on how many there are is caught; every tensor is cut.

Row 20 of the public faults: 32, 16, 8, 4 value heads of the same case each equal their slice.
"""

from __future__ import annotations

import pytest
import torch
from gdncheck.capture.case import Case
from gdncheck.compare.axes.rank import heads_of_rank, not_shared
from gdncheck.compare.inputs import call_of
from gdncheck.compare.relations import rank_slice
from gdncheck.compare.relations.run import run_relation
from gdncheck.compare.trial import Trial
from gdncheck.compare.witness import Witness
from gdncheck.reference.conv import causal_conv
from gdncheck.reference.gate import gate
from gdncheck.reference.norm import gated_rms_norm
from gdncheck.reference.truth import truth

FAULTS = (
    "grouping by a fixed count",
    "stride of eight heads",
    "last head of few",
    "state of the first heads",
)


def faulty(honest, fault):
    """An honest chunk kernel that goes wrong with fewer heads than eight."""

    def rule(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
        heads = v.shape[1]
        if fault == "grouping by a fixed count" and heads < 8:
            # Value head h reads key head h // 4, whatever the ratio is.
            index = (torch.arange(heads) // 4).clamp(max=q.shape[1] - 1)
            q, k = q[:, index], k[:, index]
        if fault == "stride of eight heads" and heads < 8:
            g = g.flatten().roll(8 - heads).view_as(g)
        output, state = honest.chunk(
            q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=True,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        if fault == "last head of few" and heads <= 2:
            output[:, -1] = output[:, -1] * 1.05
        if fault == "state of the first heads" and heads == 4:
            state[:, 1] = state[:, 0]
        return output, state

    return rule


def outcomes(runner, case):
    witness = Witness(case)
    first = runner.run([call_of(case)])[0]
    trial = Trial(witness, runner.info, first.outputs["output"], first.outputs["final_state"])
    return run_relation(runner, trial, rank_slice.NAME, seed=0, steady=True)


@pytest.mark.parametrize(
    "heads", [(4, 8), *(pytest.param(h, marks=pytest.mark.slow) for h in [(8, 8), (2, 4), (4, 4)])]
)
@pytest.mark.parametrize("family", ["qwen", "exact"])
def test_sound_kernel_gives_every_rank_its_slice(in_process, case_of, honest, heads, family):
    case = case_of(family, k_heads=heads[0], v_heads=heads[1], dims=(16, 16), lengths=[40, 3, 70])
    found = outcomes(in_process(honest.chunk, {"profile": "fla-0.4"}), case)
    groups = [n for n in (2, 4, 8) if heads[0] % n == 0]
    assert [o.status for o in found] == ["ok"] * (1 + len(groups)), [o.reason for o in found]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_head_that_depends_on_how_many_there_are_fires(in_process, case_of, honest, fault, seed):
    case = case_of(k_heads=4, v_heads=8, dims=(16, 16), lengths=[40, 3, 70], seed=seed)
    found = outcomes(in_process(faulty(honest, fault), {"profile": "fla-0.4"}), case)
    fired = [o for o in found if o.status == "fires"]
    assert fired, fault
    assert fired[0].place is not None
    assert fired[0].place.head is not None
    assert "of rank" in fired[0].reason


@pytest.mark.parametrize(("heads", "words"), [((3, 6), "3 key and 6"), ((1, 4), "1 key and 4")])
def test_heads_that_ranks_do_not_share_evenly_are_refused_with_the_reason(
    in_process, case_of, honest, heads, words
):
    case = case_of(k_heads=heads[0], v_heads=heads[1], dims=(16, 16), lengths=[20])
    found = outcomes(in_process(honest.chunk, {"profile": "fla-0.4"}), case)
    assert [o.status for o in found] == ["not-applicable"]
    assert words in found[0].reason
    assert "not shared evenly by 2 ranks" in found[0].reason
    assert not_shared(4, 8, 4) == ""


def core(seed, k_heads=4, v_heads=8, key=4, value=6, width=4):
    """Every tensor that a core case can have, drawn at random."""
    dice = torch.Generator().manual_seed(seed)
    n_tokens, channels = 13, 2 * k_heads * key + v_heads * value

    def drawn(*shape):
        return torch.randn(*shape, generator=dice)

    return Case(op="core", tensors={
        "q": drawn(n_tokens, k_heads, key), "k": drawn(n_tokens, k_heads, key),
        "v": drawn(n_tokens, v_heads, value), "g": -drawn(n_tokens, v_heads).abs(),
        "beta": drawn(n_tokens, v_heads).sigmoid(), "cu_seqlens": torch.tensor([0, 5, 13]),
        "initial_state": drawn(2, v_heads, key, value), "has_initial_state": torch.tensor([True, False]),
        "conv_input": drawn(n_tokens, channels), "conv_weight": drawn(channels, width),
        "conv_bias": drawn(channels), "conv_state": drawn(2, channels, width - 1),
        "a": drawn(n_tokens, v_heads), "b": drawn(n_tokens, v_heads), "A_log": drawn(v_heads),
        "dt_bias": drawn(v_heads), "z": drawn(n_tokens, v_heads, value), "norm_weight": drawn(value),
        "observed_output": drawn(n_tokens, v_heads, value), "observed_layer_output": drawn(n_tokens, 9),
    })  # fmt: skip


def through_the_core(case):
    """Output and states of the layer's core in float64, from the conv's input to the gated norm."""
    heads, key, value = case["q"].shape[1], case["q"].shape[2], case["v"].shape[1]
    conv, conv_state = causal_conv(
        case["conv_input"], case["conv_weight"], case["conv_bias"], case["conv_state"], case["cu_seqlens"]
    )
    q, k, v = conv.split([heads * key, heads * key, value * case["v"].shape[2]], dim=1)
    g, beta = gate(case["a"], case["b"], case["A_log"], case["dt_bias"])
    output, state = truth(
        q.unflatten(1, (heads, key)), k.unflatten(1, (heads, key)), v.unflatten(1, (value, -1)), g, beta,
        initial_state=case["initial_state"], cu_seqlens=case["cu_seqlens"], l2norm=True,
    )  # fmt: skip
    return gated_rms_norm(output, case["z"], case["norm_weight"]), state, conv_state


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_core_of_a_rank_is_the_slice_of_the_whole_core(ranks, seed):
    case = core(seed)
    output, state, _ = through_the_core(case)
    share = case["v"].shape[1] // ranks
    for rank in range(ranks):
        own = heads_of_rank(case, ranks, rank)
        found, found_state, _ = through_the_core(own)
        value = slice(rank * share, (rank + 1) * share)
        assert torch.allclose(found, output[:, value], rtol=1e-12, atol=1e-12)
        assert torch.allclose(found_state, state[:, value], rtol=1e-12, atol=1e-12)
        assert torch.equal(own["observed_output"], case["observed_output"][:, value])
        assert own.get("observed_layer_output") is None
        assert own["conv_state"].shape[1] == own["conv_weight"].shape[0] == own["conv_input"].shape[1]


def test_pool_of_a_rank_keeps_its_slots_and_columns(case_of):
    case = case_of(k_heads=2, v_heads=4, lengths=[2, 3], dims=(8, 8), draft=3)
    own = heads_of_rank(case, 2, 1)
    assert own["pool"].shape[0] == case["pool"].shape[0]
    assert torch.equal(own["pool"], case["pool"][:, 2:])
    assert torch.equal(own["slot_indices"], case["slot_indices"])
