"""The emulation as a kernel: options reach the arithmetic, and what it cannot do is refused."""

import pytest
import torch
from gdncheck.capture.errors import Refused
from gdncheck.kernels.emulation import KERNELS
from gdncheck.kernels.interface import KernelCall, RunOptions
from gdncheck.reference.emulation import emulate_chunk
from gdncheck.reference.truth import truth


def tensors(tokens=70, dtype=torch.bfloat16, seed=0, raw=False):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    q, k = normal(tokens, 1, 16) * 3, normal(tokens, 1, 16) * 3
    if not raw:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    return {
        "q": q.to(dtype), "k": k.to(dtype), "v": normal(tokens, 2, 8).to(dtype),
        "g": -0.2 * torch.rand(tokens, 2, generator=draw), "beta": torch.sigmoid(normal(tokens, 2)),
        "cu_seqlens": torch.tensor([0, 30, tokens]), "initial_state": normal(2, 2, 16, 8),
    }  # fmt: skip


def run(op="chunk", given=None, **options):
    return KERNELS[op](version=None).run(
        KernelCall(tensors=given or tensors(), options=RunOptions(**options))
    )


def relative(x, y):
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


@pytest.mark.parametrize("op", ["chunk", "recurrent"])
def test_it_returns_what_a_kernel_returns_and_is_right(op):
    t = tensors()
    out = run(op, t)
    true, state = truth(**t)
    assert out["output"].dtype == torch.bfloat16
    assert out["final_state"].dtype == torch.float32
    assert relative(out["output"], true) < 6e-3
    assert relative(out["final_state"], state) < 6e-3
    assert "final_state" not in run(op, t, output_final_state=False)


def test_a_pool_is_gathered_and_a_fresh_sequence_starts_from_zero():
    t = tensors()
    state = t.pop("initial_state")
    pool = torch.full((5, 2, 16, 8), torch.nan)
    pool[3] = state[1]
    t |= {
        "pool": pool,
        "slot_indices": torch.tensor([1, 3]),
        "has_initial_state": torch.tensor([False, True]),
    }
    by_hand = tensors() | {"initial_state": torch.stack([torch.zeros_like(state[0]), state[1]])}
    assert torch.equal(run(given=t)["output"], run(given=by_hand)["output"])


@pytest.mark.parametrize(
    "extra",
    [{"profile": "hf-torch"}, {"casts": {"h": "fp16"}}, {"mode": "toward-zero"}, {"mode": "stochastic"}],
)
def test_each_option_changes_the_result(extra):
    plain = run(given=tensors())
    assert not torch.equal(run(extra=extra)["output"], plain["output"])
    assert torch.equal(run(extra=extra)["output"], run(extra=extra)["output"])


def test_a_variant_moves_float32_bits():
    t = tensors(dtype=torch.float32)
    plain = run(given=t)["final_state"]
    assert not torch.equal(run(given=t, extra={"variant": 1})["final_state"], plain)


def test_l2norm_in_the_kernel_and_before_it_differ_where_the_profile_keeps_float32():
    t = tensors(raw=True)
    recurrent = [
        run("recurrent", t, qk="raw", l2norm=place)["final_state"] for place in ("in_kernel", "before")
    ]
    assert not torch.equal(*recurrent)
    true, _ = truth(**t, l2norm=True)
    for place in ("in_kernel", "before", None):
        assert relative(run(given=t, qk="raw", l2norm=place)["output"], true) < 8e-3
    assert relative(run(given=t)["output"], true) > 0.1, "without the norm it is another function"


def test_a_state_dtype_rounds_at_the_hand_over():
    out = run(state_dtype="bfloat16")
    assert out["final_state"].dtype == torch.bfloat16
    t = tensors()
    rounded = t | {"initial_state": t["initial_state"].bfloat16().float()}
    assert torch.equal(out["output"], run(given=rounded)["output"])


def test_chunk_size_reaches_the_algorithm():
    t = tensors()
    small = emulate_chunk(**t, precision="generic", chunk_size=16)
    assert torch.equal(run(given=t, chunk_size=16)["output"], small.output.bfloat16())


@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        ("chunk", {"chunk_size": 48}, "chunk size 48"),
        ("recurrent", {"chunk_size": 64}, "no chunks"),
        ("chunk", {"state_dtype": "float64"}, "state dtype float64"),
        ("chunk", {"extra": {"profle": "x"}}, "no option 'profle'"),
        ("chunk", {"extra": {"profile": "x"}}, "unknown precision profile 'x'"),
        ("chunk", {"extra": {"casts": {"x": "bf16"}}}, "unknown cast point 'x'"),
        ("chunk", {"extra": {"mode": "up"}}, "unknown rounding mode 'up'"),
        ("chunk", {"extra": {"variant": 9}}, "variant 9"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_value(op, options, message):
    with pytest.raises(Refused, match=message):
        run(op, **options)


def test_a_gate_per_channel_is_refused():
    t = tensors()
    with pytest.raises(Refused, match="per key channel"):
        run(given=t | {"g": torch.zeros(70, 2, 16)})


def test_it_describes_itself():
    for op, adapter in KERNELS.items():
        info = adapter(version=None).describe()
        assert info.name == f"emulation.{op}"
        assert info.contract == adapter.contract_for(None)
        assert info.capabilities.profile == info.contract.value("precision.profile")
