"""fla's kernels through their adapter, interpreted, against the float64 truth; refusals and evidence.

One worker per version and operation serves the whole module; cases are small, since the interpreter is
slow. What needs fla-core 0.6.0 fetches it into the cache, and is skipped where that cannot be done.
"""

from __future__ import annotations

import pytest
import torch
from gdncheck.capture.errors import CannotRun
from gdncheck.kernels import cache, registry
from gdncheck.kernels.interface import KernelCall, RunOptions
from gdncheck.kernels.pool import WorkerPool
from gdncheck.reference.chunk import chunk_form
from gdncheck.reference.truth import truth

LIMIT = 0.005  # global RMS of bf16 chunk kernels against float64; 3e-3 is usual
VERSIONS = ("0.4.0", "0.6.0")


def tensors(
    lengths=(40, 1, 89), HK=1, HV=2, K=64, V=64, dtype=torch.bfloat16, seed=0, normalised=True, state=True
):
    """Unit keys and queries, decays of 0 to -0.5, betas of 0 to 1 in the input dtype, asymmetric states."""
    generator = torch.Generator().manual_seed(seed)
    T = sum(lengths)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    q, k = draw(T, HK, K), draw(T, HK, K)
    if normalised:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    made = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": draw(T, HV, V).to(dtype),
        "g": -torch.rand(T, HV, generator=generator) * 0.5,
        "beta": torch.rand(T, HV, generator=generator).to(dtype),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
    }
    if state:
        made["initial_state"] = draw(len(lengths), HV, K, V)
    return made


def true(t, l2norm=False, scale=None):
    return truth(
        t["q"], t["k"], t["v"], t["g"], t["beta"], scale=scale, l2norm=l2norm,
        initial_state=t.get("initial_state"), cu_seqlens=t["cu_seqlens"],
    )  # fmt: skip


def error(found, wanted):
    """Relative RMS over the whole tensor."""
    return ((found.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()).item()


def fetched(version):
    """The version, fetched where it is not installed; skips where it cannot be."""
    if registry.installed_version("fla-core") == version:
        return version
    try:
        cache.fetch(f"fla@{version}")
    except CannotRun as failure:
        pytest.skip(f"fla-core {version} is neither installed nor to be fetched: {failure}")
    return version


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(device="cpu", time_limit=240) as opened:
        yield opened


@pytest.fixture(scope="module")
def kernels(pool):
    opened = {}

    def get(op, version):
        key = f"fla.{op}@{fetched(version)}"
        if key not in opened:
            opened[key] = pool.open(key)
        return opened[key]

    return get


def run(kernel, t, **options):
    """The result of one call, which must succeed."""
    (result,) = kernel.run([KernelCall(tensors=t, options=RunOptions(**options))])
    assert result.status == "ok", result.message
    return result


def refusal(kernel, t, **options):
    (result,) = kernel.run([KernelCall(tensors=t, options=RunOptions(**options))])
    assert result.status == "refused", (result.status, result.message)
    return result.message


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128)])
def test_chunk_kernel_in_the_interpreter_agrees_with_float64(kernels, version, K, V):
    t = tensors(K=K, V=V)
    result = run(kernels("chunk", version), t)
    output, state = true(t)
    assert result.outputs["output"].dtype == torch.bfloat16
    assert result.outputs["final_state"].dtype == torch.float32
    assert 1e-4 < error(result.outputs["output"], output) < LIMIT
    assert 1e-4 < error(result.outputs["final_state"], state) < LIMIT


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 1e-3), (torch.float32, 2e-6)])
def test_chunk_kernel_is_as_precise_as_its_input_type(kernels, version, dtype, limit):
    t = tensors((3, 67), dtype=dtype, V=32)
    result = run(kernels("chunk", version), t)
    output, state = true(t)
    assert error(result.outputs["output"], output) < limit
    assert error(result.outputs["final_state"], state) < limit


@pytest.mark.parametrize("version", VERSIONS)
def test_recurrent_kernel_in_the_interpreter_agrees_with_float64(kernels, version):
    t = tensors((5, 0, 6), K=64, V=32, dtype=torch.float32)
    result = run(kernels("recurrent", version), t)
    output, state = true(t)
    assert error(result.outputs["output"], output) < 2e-6
    assert error(result.outputs["final_state"], state) < 2e-6
    assert torch.equal(result.outputs["final_state"][1], t["initial_state"][1])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("chunk_size", [16, 32])
def test_chunk_size_is_obeyed_and_not_swallowed(kernels, version, chunk_size):
    t = tensors((70,), dtype=torch.float32, V=32)
    kernel = kernels("chunk", version)
    result = run(kernel, t, chunk_size=chunk_size)
    plain = run(kernel, t)
    assert error(result.outputs["output"], true(t)[0]) < 2e-6
    assert not torch.equal(result.outputs["final_state"], plain.outputs["final_state"])
    expected = "stage functions" if version.startswith("0.4") else "chunk_gated_delta_rule"
    assert result.evidence["path"] == expected
    names = " ".join(result.evidence["launched"])
    assert ("16x16_kernel" in names) == (chunk_size == 16)


@pytest.mark.parametrize("version", VERSIONS)
def test_l2norm_in_the_kernel_and_before_it_differ_by_rounding_only(kernels, version):
    t = tensors((20,), normalised=False, HK=2)
    t["k"] = t["k"] * 3
    kernel = kernels("chunk", version)
    within = run(kernel, t, qk="raw")
    before = run(kernel, t, qk="raw", l2norm="before")
    output, state = true(t, l2norm=True)
    for result in (within, before):
        assert error(result.outputs["output"], output) < LIMIT
        assert error(result.outputs["final_state"], state) < LIMIT
    assert (within.evidence["l2norm"], before.evidence["l2norm"]) == ("in_kernel", "before")


@pytest.mark.parametrize("version", VERSIONS)
def test_value_heads_read_their_own_key_head(kernels, version):
    t = tensors((17,), HK=2, HV=4, dtype=torch.float32, V=32)
    result = run(kernels("chunk", version), t)
    assert error(result.outputs["output"], true(t)[0]) < 2e-6
    assert result.evidence["heads_expanded"] == version.startswith("0.4")


def test_scale_state_type_and_absent_state(kernels):
    kernel = kernels("chunk", "0.4.0")
    t = tensors((17,), dtype=torch.float32, V=32, state=False)
    assert error(run(kernel, t, scale=0.3).outputs["output"], true(t, scale=0.3)[0]) < 2e-6
    rounded = run(kernel, t, state_dtype="bfloat16").outputs["final_state"]
    assert rounded.dtype == torch.bfloat16
    assert "final_state" not in run(kernel, t, output_final_state=False).outputs


def test_empty_sequences_are_passed_where_they_are_counted_and_refused_where_not(kernels):
    t = tensors((0, 3, 0, 17), dtype=torch.float32, V=32)
    said = refusal(kernels("chunk", "0.4.0"), t)
    assert "sequence 0 is empty" in said
    result = run(kernels("chunk", "0.6.0"), t)
    assert error(result.outputs["final_state"], true(t)[1]) < 2e-6
    # Only at the end they do no harm anywhere, even where there is nothing else.
    for lengths in ((3, 17, 0, 0), (0, 0)):
        t = tensors(lengths, dtype=torch.float32, V=32)
        result = run(kernels("chunk", "0.4.0"), t)
        assert torch.equal(result.outputs["final_state"][-1], t["initial_state"][-1])
        assert result.outputs["output"].shape == t["v"].shape


def test_refused_empty_sequences_would_really_have_been_mixed_up(kernels):
    t = tensors((0, 3, 17), dtype=torch.float32, V=32)
    result = run(kernels("chunk", "0.4.0"), t, extra={"allow_empty": True})
    found = error(result.outputs["output"].nan_to_num(1e3), true(t)[0])
    assert found > 0.1


REFUSED = {
    "channel gate": ({"g": torch.zeros(17, 2, 64)}, {}, "per key channel"),
    "mixed types": ({"v": torch.zeros(17, 2, 32)}, {}, "must share one of"),
    "float64": ({n: torch.zeros(17, 2, 64, dtype=torch.float64) for n in "qkv"}, {}, "float64"),
    "heads": (
        {"q": torch.zeros(17, 3, 64).bfloat16(), "k": torch.zeros(17, 3, 64).bfloat16()},
        {},
        "2 value heads",
    ),
    "chunk size": ({}, {"chunk_size": 128}, "chunk size 128"),
    "state type": ({}, {"state_dtype": "float64"}, "state dtype float64"),
    "no sequence": ({"cu_seqlens": torch.tensor([0])}, {}, "no sequence"),
    "stage": ({}, {"extra": {"stage": "conv"}}, "stage 'conv'"),
    "stage input": ({}, {"extra": {"stage": "kkt"}}, "needs cumsum"),
    "key dim": ({n: torch.zeros(17, 1, 512).bfloat16() for n in "qk"}, {}, "K=512"),
    "pin": ({}, {"pins": {"chunk_fwd_kernel_o": {"BK": 7}}}, "matches no configuration"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_calls_outside_the_capabilities_are_refused_with_the_value(kernels, what):
    changed, options, words = REFUSED[what]
    assert words in refusal(kernels("chunk", "0.4.0"), {**tensors((17,), V=32), **changed}, **options)


def test_pinned_configuration_is_the_one_launched(kernels):
    t = tensors((17,), dtype=torch.float32)
    kernel = kernels("chunk", "0.4.0")
    pins = {"chunk_scaled_dot_kkt_fwd_kernel": {"BK": 32, "num_warps": 8}, "no_such_kernel": {"BK": 1}}
    result = run(kernel, t, pins=pins)
    assert result.evidence["launched"]["chunk_scaled_dot_kkt_fwd_kernel"].startswith("BK=32, num_warps=8")
    assert result.evidence["pins_unused"] == ["no_such_kernel"]
    after = run(kernel, t)
    assert after.evidence["launched"]["chunk_scaled_dot_kkt_fwd_kernel"].startswith("BK=128")


@pytest.mark.parametrize("version", VERSIONS)
def test_description_and_evidence_say_what_ran(kernels, version):
    kernel = kernels("chunk", version)
    info = kernel.info
    assert info.name == f"fla.chunk@{version}"
    assert info.capabilities.gva == (not version.startswith("0.4"))
    assert info.capabilities.chunk_sizes == (16, 32, 64)
    assert info.environment["interpreted"] is True
    assert info.environment["FLA_DISABLE_BACKEND_DISPATCH"] == "1"
    assert info.environment["FLA_INTRACARD_CP"] == "0", "0.4.2 would split long sequences"
    assert info.contract.kernel.startswith("fla.chunk")
    assert info.contract.clauses


# Stages


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_every_stage_agrees_with_the_float64_stage_of_its_name(kernels, version, chunk_size):
    t = tensors((40, 70), dtype=torch.float32, V=32)
    got = run(kernels("chunk", version), t, chunk_size=chunk_size, extra={"stages": True}).outputs
    form = chunk_form(
        t["q"], t["k"], t["v"], t["g"], t["beta"], chunk_size=chunk_size, cu_seqlens=t["cu_seqlens"],
        initial_state=t["initial_state"], stages=True,
    )  # fmt: skip
    wanted = {**form.stages, "final_state": form.final_state}
    fused = version == "0.6.0" and chunk_size == 64
    assert set(wanted) - set(got) == ({"kkt"} if fused else set())
    for name, value in got.items():
        assert value.shape == wanted[name].shape, name
        assert error(value, wanted[name]) < 2e-6, name


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("chunk_size", [32, 64])
def test_stage_fed_with_the_chains_own_values_gives_the_chains_bits(kernels, version, chunk_size):
    t = tensors((40, 30))
    kernel = kernels("chunk", version)
    chain = run(kernel, t, chunk_size=chunk_size, extra={"stages": True}).outputs
    for stage, outputs in {
        "cumsum": ("cumsum",), "kkt": ("kkt",), "solve": ("solve",), "wu": ("w", "u"),
        "state": ("h", "v_new", "final_state"), "output": ("output",),
    }.items():  # fmt: skip
        if stage == "kkt" and "kkt" not in chain:
            continue
        given = {**t, **{name: value for name, value in chain.items() if name not in t}}
        alone = run(kernel, given, chunk_size=chunk_size, extra={"stage": stage}).outputs
        assert set(alone) == set(outputs)
        for name in outputs:
            assert torch.equal(alone[name], chain[name]), (stage, name)


def test_stage_fed_with_a_wrong_value_passes_it_on(kernels):
    t = tensors((40,))
    kernel = kernels("chunk", "0.4.0")
    chain = run(kernel, t, extra={"stages": True}).outputs
    wrong = chain["w"].clone()
    wrong[33] += 1
    given = {**t, **chain, "w": wrong}
    alone = run(kernel, given, extra={"stage": "state"}).outputs
    assert torch.equal(alone["v_new"][:33], chain["v_new"][:33])
    assert not torch.equal(alone["v_new"][33], chain["v_new"][33])
