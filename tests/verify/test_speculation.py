"""Chains of speculative steps: one wrong column anywhere is found at its turn, a sound chain passes whole."""

from __future__ import annotations

import planted_verify
import pytest
from gdncheck.capture.errors import BadInput
from gdncheck.capture.make import make
from gdncheck.compare.verify.speculation import prefill_for, speculate, turns_of
from gdncheck.reference.emulation import emulate_chunk

slow = pytest.mark.slow


def chunk(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
    result = emulate_chunk(q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return result.output.to(v.dtype), result.final_state.float()


chunk.gdncheck_capabilities = {"profile": "generic", "state_dtypes": ("float32", "bfloat16")}


def chain(in_process, function, seed, *, draft=3, steps=4, **more):
    case = make(
        ("qwen", "gaussian", "no-decay")[seed % 3], lengths=[9, 6, 12], k_heads=1, v_heads=2, dims=(16, 16),
        state=more.pop("state", "random"), seed=seed,
    )  # fmt: skip
    return speculate(
        in_process(function), in_process(chunk), case, draft=draft, steps=steps, seed=seed, **more
    )


@pytest.mark.parametrize(
    ("seed", "state_dtype"),
    [
        (1, "bfloat16"),
        *(pytest.param(s, d, marks=slow) for s in (0, *range(2, 8)) for d in ("float32", "bfloat16")),
    ],
)
def test_sound_chain_passes_at_every_step_and_as_a_whole(in_process, seed, state_dtype):
    found = chain(
        in_process, planted_verify.sound, seed, draft=1 + 3 * (seed % 3), state_dtype=state_dtype,
        state="none" if seed == 1 else "random",
    )  # fmt: skip
    assert found.verdict == "pass", found.ruling.reason
    assert "accepted tokens" in found.ruling.reason
    assert 0 < found.accepted < found.drafted


FAULTS = sorted(set(planted_verify.FAULTS) - {"StaleFreshSequence", "DraftRowsSwapped"})


QUICK = ("AcceptedOffByOne", "EveryColumnTheLast")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=slow) for n in FAULTS])
def test_planted_fault_is_found_at_a_verify_turn(in_process, name):
    found = chain(in_process, planted_verify.FAULTS[name], 1, draft=4)
    assert found.verdict == "fail", found.ruling.reason
    assert found.failed_turn is not None
    assert f"turn {found.failed_turn + 1} of {found.turns} (verify)" in found.ruling.reason


def test_state_that_a_prefill_puts_elsewhere_is_found_at_the_prefill(in_process):
    case = make("gaussian", lengths=[9, 6], k_heads=1, v_heads=2, dims=(16, 16), seed=1)
    found = speculate(in_process(planted_verify.sound), in_process(_rolled), case, steps=1)
    assert found.verdict == "fail"
    assert found.failed_turn == 0


def _rolled(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
    output, state = chunk(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=True,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return output, state.roll(1, 0)


_rolled.gdncheck_capabilities = chunk.gdncheck_capabilities


@pytest.mark.parametrize("draft", [1, 3, 8])
def test_schedule_accepts_none_and_all_and_ends_with_a_plain_step_and_a_prefill(draft):
    turns = turns_of(3, draft, 6, prompt=5, seed=2)
    steps = [t for t in turns if t.kind == "verify"]
    assert [t.kind for t in turns[:1] + turns[-2:]] == ["prefill", "verify", "prefill"]
    assert steps[-1].tokens == (1, 1, 1)
    drafts = [(n - 1, a - 1) for t in steps[:-1] for n, a in zip(t.tokens, t.accepted, strict=True)]
    assert all(1 <= d <= draft and 0 <= a <= d for d, a in drafts)
    assert any(a == 0 for _, a in drafts)
    assert any(a == d for d, a in drafts)


def test_draft_of_nothing_is_no_speculation(in_process):
    with pytest.raises(BadInput, match="draft is 0"):
        chain(in_process, planted_verify.sound, 1, draft=0)


def test_prefill_of_a_verify_kernel_is_its_own_familys():
    assert prefill_for("vllm.verify@0.19.1") == "vllm.chunk@0.19.1"
    assert prefill_for("sglang.verify") == "sglang.chunk"
    assert prefill_for("planted_verify:sound") == "emulation.chunk"
